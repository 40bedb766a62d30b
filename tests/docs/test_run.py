"""The documentation's short commands run in a fresh folder, in the order of the pages.

The script of docs/python.md runs too.
"""

import io
import os
import runpy
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.data.storage.manifest import read_manifest
from anlit.reporting.table import markdown_table
from anlit.reporting.text import code as shown
from tests.docs.pages import ROOT, commands, files

pytestmark = pytest.mark.slow
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "train.md",
    ROOT / "docs" / "training-options.md",
    ROOT / "docs" / "attention.md",
    ROOT / "docs" / "after-training.md",
    ROOT / "docs" / "studies.md",
]
NEEDS_QWEN3 = "needs a Qwen3 from the hub"
NEEDS_SMOLLM2 = "needs a SmolLM2 from the hub"
RUN_FROM_WEIGHTS = "tests/integration/test_begun_from_weights.py runs it"
REASONS = {
    "Qwen3-1.7B": NEEDS_QWEN3,
    "SmolLM2-135M-Instruct": NEEDS_SMOLLM2,
    "imported/smollm2": NEEDS_SMOLLM2,
    "imported/qwen3/tokenizer.json": NEEDS_QWEN3,
    "imported/qwen3": f"{NEEDS_QWEN3}; {RUN_FROM_WEIGHTS}",
    "needle": "takes minutes; tests/evaluation/test_needle.py runs it",
    "logger/wandb.yaml": "needs wandb; tests/integration/test_run_logs.py runs it",
    "runs/angpt-needle": f"300 steps; {RUN_FROM_WEIGHTS}",
    "--slurm=--gpus-per-node=1 --ntasks-per-node=1": "needs Slurm",
    "runs/mine": "1,000 steps",
    "runs/angpt-0.5b": "needs SlimPajama and four GPUs",
    "study/convergence.yaml": "54 runs",
    "study/ablation.yaml": "60 runs",
    "study/search.yaml": "38 runs",
    "study/annealed.yaml": "75 runs",
}
"""Why a command with this argument is not run."""
TABLE_PAGE = """# The commands of the documentation

Each `anlit` command of README and of the pages below was run in an empty folder, in their order, as

```bash
DOCS_TABLE=docs/reference/commands.md python -m pytest -m slow tests/docs/test_run.py
```

does. Those that take long or need something from elsewhere are not run.
"""
EXPORTED = "exported/angpt"
RESULTS = (
    "runs/comparison/report.html",
    "runs/power-bias/run.json",
    "runs/own-configuration/run.json",
    "runs/profile/fit-profile.txt",
    "reports/lengths/lengths.md",
    "reports/gaussian",
    "reports/scores.parquet",
    "reports/diagnose",
    "exported/angpt/model.safetensors",
    "exported/angpt-hf/config.json",
    "exported/gpt-hf/config.json",
)
"""Files that the commands write."""


def copy_texts(folder: Path, pattern: str) -> None:
    """Copy files of Python's library as texts."""
    (folder / "texts").mkdir()
    sources = Path(sysconfig.get_path("stdlib")).glob(pattern)
    for number, source in enumerate(sorted(sources)):
        shutil.copy(source, folder / "texts" / f"{number}.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: text files, and the files that the pages tell to write."""
    folder = tmp_path_factory.mktemp("reader")
    copy_texts(folder, "*.py")
    for page in PAGES:
        for name, content in files(page):
            (folder / name).write_text(content, encoding="utf-8")
    return folder


def outcome(arguments: list[str]) -> str:
    """Return pass, FAIL with the exit code, or the reason why the command is not run.

    Printing help or the configuration passes too.
    """
    reasons = [REASONS[argument] for argument in arguments if argument in REASONS]
    if reasons and "--dry_run" not in arguments:
        return f"not run: {'; '.join(reasons)}"
    try:
        code: int | str = main(arguments)
    except SystemExit as end:
        code = end.code or 0
    return "pass" if code == 0 else f"FAIL ({code})"


def test_commands_run_as_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table_file = os.environ.get("DOCS_TABLE")
    table_path = Path(table_file).resolve() if table_file else None
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("def main(\n"))  # for --interactive

    rows = []
    for page in PAGES:
        for arguments in commands(page):
            command = shown(shlex.join(["anlit", *arguments]))
            rows.append([page.name, command, outcome(arguments)])

    table = markdown_table(["page", "command", "outcome"], rows, range(3))
    print(table)
    if table_path is not None:
        table_path.write_text(f"{TABLE_PAGE}\n{table}\n")
    assert [row for row in rows if row[2].startswith("FAIL")] == []
    assert [path for path in RESULTS if not (folder / path).exists()] == []
    assert list((folder / "runs" / "profile").glob("*.pt.trace.json"))


def test_commands_take_exported_folders_as_documented(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See docs/after-training.md. The folders are results of the commands above."""
    monkeypatch.chdir(folder)
    common = ["--data", "data/mine", "--lengths", "256", "--output", "again"]
    for command in (
        ["generate", EXPORTED, "import", "--max_tokens", "3"],
        ["score", EXPORTED, "texts/0.txt", "--output", "again.parquet"],
        ["lengths", EXPORTED, "--tokens", "4096", *common],
        ["needle", EXPORTED, "--depths", "2", "--samples", "1", *common],
        ["diagnose", EXPORTED, "--tokens", "2048", *common],
    ):
        assert main(command) == 0, command
    assert main(["compare", EXPORTED, "--output", "again"]) == 2
    configuration = ["--config", f"{EXPORTED}/config.yaml"]
    assert main(["validate", *configuration, "--ckpt_path", EXPORTED]) == 2

    fit = ["fit", "--config", "model/angpt.yaml", "--config", "small.yaml"]
    fit += ["--trainer.max_steps", "1"]
    assert main([*fit, "--initial_weights", EXPORTED, "--run_dir", "runs/again"]) == 0


def test_the_script_for_python_runs_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    copy_texts(tmp_path, "email/*.py")
    name = "own_trainer.py"
    (tmp_path / name).write_text(dict(files(ROOT / "docs" / "python.md"))[name])

    runpy.run_path(name, run_name="__main__")
    assert "loss " in capsys.readouterr().out.splitlines()[-1]
    assert main(["generate", "runs/python-api/best.ckpt", "def", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def")


def test_the_script_for_python_runs_on_texts_with_fewer_tokens_than_it_asks_for(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "own_trainer.py"
    Path(name).write_text(dict(files(ROOT / "docs" / "python.md"))[name])
    Path("texts").mkdir()
    for number in range(20):
        Path(f"texts/{number}.txt").write_text(f"{number} is a number\n" * 100)

    runpy.run_path(name, run_name="__main__")

    assert "loss " in capsys.readouterr().out.splitlines()[-1]
    assert read_manifest("data/python-api")["vocab_size"] < 512


def test_the_script_with_a_dataset_runs_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name = "own_dataset.py"
    (tmp_path / name).write_text(dict(files(ROOT / "docs" / "python.md"))[name])

    runpy.run_path(name, run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].endswith("bits per byte")

"""The documentation's commands that take seconds do what they say, in a fresh folder, in the order of the pages; the
script of docs/python.md runs too."""

import os
import runpy
import shlex
import shutil
import sysconfig
from pathlib import Path

import pytest

from anlit.cli import main
from anlit.reporting.table import markdown_table
from anlit.reporting.text import code as shown
from tests.docs.pages import ROOT, commands, files

pytestmark = pytest.mark.slow
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("train", "attention", "after-training",
                                                                          "studies"))]  # fmt: skip
NOT_RUN = {
    "import": "needs a Qwen3 from the hub", "imported/qwen3/tokenizer.json": "needs a Qwen3 from the hub",
    "imported/qwen3": "needs a Qwen3 from the hub; tests/integration/test_begun_from_weights.py runs it",
    "needle": "takes minutes; tests/evaluation/test_needle.py runs it",
    "logger/wandb.yaml": "needs wandb; tests/integration/test_run_logs.py runs it",
    "runs/angpt-needle": "300 steps; tests/integration/test_begun_from_weights.py runs it",
    "--slurm=--gpus-per-node=1 --ntasks-per-node=1": "needs Slurm",
    "runs/mine": "1,000 steps", "study/convergence.yaml": "54 runs", "study/ablation.yaml": "60 runs",
}  # fmt: skip
TABLE_PAGE = """# The commands of the documentation

Each `anlit` command of README and of the pages below was run in an empty folder, in their order, as

```bash
DOCS_TABLE=docs/reference/commands.md python -m pytest -m slow tests/docs/test_run.py
```

does. Those that take long or need something from elsewhere are not run.
"""
EXPORTED, FOLDED = "exported/angpt", "exported/angpt-folded"


def copy_texts(folder: Path, sources: str) -> None:
    (folder / "texts").mkdir()
    for number, source in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob(sources))):
        shutil.copy(source, folder / "texts" / f"{number}.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader begins: text files, and the files that the pages say to write."""
    folder = tmp_path_factory.mktemp("reader")
    copy_texts(folder, "*.py")
    for page in PAGES:
        for name, content in files(page):
            (folder / name).write_text(content, encoding="utf-8")
    return folder


def outcome(words: list[str]) -> str:
    """Pass, FAIL with the exit code, or why it is not run; printing help or the configuration passes too."""
    if "--dry_run" not in words and (
        reasons := [NOT_RUN[word] for word in words if word in NOT_RUN]
    ):
        return f"not run: {'; '.join(reasons)}"
    try:
        code: int | str = main(words)
    except SystemExit as end:
        code = end.code or 0
    return "pass" if code == 0 else f"FAIL ({code})"


def test_commands_run_as_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table_file = Path(file).resolve() if (file := os.environ.get("DOCS_TABLE")) else None
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    typed = [(page, words) for page in PAGES for words in commands(page)]
    rows = [
        [page.name, shown(shlex.join(["anlit", *words])), outcome(words)] for page, words in typed
    ]
    table = markdown_table(["page", "command", "outcome"], rows, range(3))
    print(table)
    if table_file is not None:
        table_file.write_text(f"{TABLE_PAGE}\n{table}\n")
    assert [row for row in rows if row[2].startswith("FAIL")] == []
    for left in (
        "runs/comparison/report.html", "runs/power-bias/run.json", "runs/own-configuration/run.json",
        "runs/profile/fit-profile.txt", "reports/lengths/lengths.md", "reports/gaussian", "reports/scores.parquet",
        "reports/diagnose", "exported/angpt/model.safetensors", "exported/angpt-hf/config.json",
    ):  # fmt: skip
        assert (folder / left).exists(), left
    assert list((folder / "runs" / "profile").glob("*.pt.trace.json"))


def test_table_of_what_takes_exported_folders_is_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/after-training.md; it goes on with the folders that the commands above left."""
    monkeypatch.chdir(folder)
    for exported in (EXPORTED, FOLDED):
        common = ["--data", "data/mine", "--lengths", "256", "--output", "again"]
        for words in (
            ["generate", exported, "import", "--max_tokens", "3"],
            ["score", exported, "texts/0.txt", "--output", "again.parquet"],
            ["lengths", exported, "--tokens", "4096", *common],
            ["needle", exported, "--depths", "2", "--samples", "1", *common],
            ["diagnose", exported, "--tokens", "2048", *common],
        ):
            assert main(words) == 0, words
        assert main(["compare", exported, "--output", "again"]) == 2
        assert (
            main(["validate", "--config", f"{exported}/config.yaml", "--ckpt_path", exported]) == 2
        )
    start = [
        "fit",
        "--config",
        "model/angpt.yaml",
        "--config",
        "small.yaml",
        "--trainer.max_steps",
        "1",
    ]
    assert main([*start, "--initial_weights", EXPORTED, "--run_dir", "runs/again"]) == 0
    assert main([*start, "--initial_weights", FOLDED, "--run_dir", "runs/folded"]) == 2


def test_the_script_for_python_runs_as_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    copy_texts(tmp_path, "email/*.py")
    ((name, content),) = files(ROOT / "docs" / "python.md")
    (tmp_path / name).write_text(content)
    runpy.run_path(name, run_name="__main__")
    assert "loss " in capsys.readouterr().out.splitlines()[-1]
    assert main(["generate", "runs/python-api/best.ckpt", "def", "--max_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def")

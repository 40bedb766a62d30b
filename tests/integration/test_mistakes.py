"""A table of mistakes on the command line: exit code 2, and a sentence with the fix.

    MISTAKES_TABLE=docs/reference/mistakes.md python -m pytest -m "slow or not slow" \\
        tests/integration/test_mistakes.py

writes it to the file that the variable names.
"""

import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import COMMANDS, main
from anlit.reporting.table import markdown_table
from anlit.reporting.text import code
from tests.checkpoints.foreign import trained
from tests.data.prepared import VOCABULARY, random_tokens, write_prepared
from tests.integration.mistakes import FAST, SLOW

PAGE = """# Mistakes and their answers

Each row was typed in a folder with a small trained run, its exports and prepared data. Each ends
with exit code 2 and this sentence on standard error, without a traceback. `tiny.yaml` is the
configuration of a small run. A test asserts the exit code and what the sentence says:

```bash
MISTAKES_TABLE=docs/reference/mistakes.md python -m pytest -m "slow or not slow" \\
    tests/integration/test_mistakes.py -q
```

Paths are shortened to the file's name. Foreign and damaged files have
[a table of their own](trust.md).
"""
RATE = "model.init_args.optimizer.init_args.lr"
SHAPE = {"vocab_size": 320, "context_length": 16, "n_layers": 1, "n_heads": 2, "d_model": 16}
TINY: dict[str, Any] = {
    "model": {"class_path": "anlit.GPT", "init_args": SHAPE},
    "run_dir": "new",
    "data": {"class_path": "anlit.TokenShards", "init_args": {"path": "data", "batch_size": 2}},
    "trainer": {"accelerator": "cpu", "max_steps": 40, "enable_progress_bar": False},
}
TEXTS = {
    "texts/0.txt": "the cat sat on the mat",
    "empty.txt": "",
    "bad.jsonl": "{\n",
    "cut.yaml": "model: [",
    "three.yaml": "trainer: 3",
    "tab.yaml": "model:\n\tclass_path: anlit.GPT\n",
    "tiny.yaml": yaml.safe_dump(TINY),
}
STUDY: dict[str, Any] = {
    "arms": {"gpt": {"configs": ["tiny.yaml"], "tune": {RATE: [0.1, 0.2]}}},
    "seeds": [1, 2],
}
STUDIES: dict[str, dict[str, Any]] = {
    "study": {},
    "seeded": {"shared": {"settings": {"seed_everything": "one"}}},
    "sections": {"sections": ["nonesuch"]},
    "high": {
        "arms": {
            **STUDY["arms"],
            "fast": {"configs": ["tiny.yaml"], "tune": {RATE: [0.1, "high"]}},
        },
        "baseline": "gpt",
    },
    "after": {"after": {"lengths": "anlit lengthz {runs}"}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder in which the commands are typed. No command changes it."""
    root = tmp_path_factory.mktemp("mistakes")
    run = trained(root, "AnGPT")
    for name, *options in (("exported",), ("hf", "--format=huggingface")):
        assert main(["export", str(run), "--output", str(root / name), *options]) == 0
    shutil.copytree(root / "data", root / "swapped")
    (root / "swapped" / "tokenizer.json").write_text(
        (root / "data" / "tokenizer.json").read_text() + "\n"
    )
    for name, vocabulary in (("beyond", 5000), ("other", 320)):
        streams = {"train": random_tokens(3000, 1, vocabulary), "val": random_tokens(600, 2)}
        write_prepared(root / name, streams, vocab_size=VOCABULARY)
    for name in ("texts", "empty"):
        (root / name).mkdir()
    for name, text in TEXTS.items():
        (root / name).write_text(text)
    (root / "cut.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:1000])
    for name, changes in STUDIES.items():
        (root / f"{name}.yaml").write_text(yaml.safe_dump(STUDY | changes))
    return root


@pytest.fixture(scope="module")
def rows() -> Iterator[list[list[str]]]:
    """Rows of the table, written at the end if all mistakes were made."""
    rows: list[list[str]] = []
    yield rows
    file = os.environ.get("MISTAKES_TABLE")
    all_made = len(rows) == len(FAST) + len(SLOW)
    if file and all_made:
        table = markdown_table(["typed", "exit code", "sentence"], rows, range(3))
        Path(file).write_text(f"{PAGE}\n{table}\n")


FAST_CASES = [pytest.param(*row, id=row[0]) for row in FAST]
SLOW_CASES = [pytest.param(*row, id=row[0], marks=pytest.mark.slow) for row in SLOW]


@pytest.mark.parametrize(("typed", "says"), FAST_CASES + SLOW_CASES)
def test_mistake(
    typed: str, says: str, folder: Path, rows: list[list[str]], monkeypatch, refusal
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    paths = sorted(folder.rglob("*"))
    error = refusal(*shlex.split(typed))
    left_names = {path.name for path in folder.glob("new/*")}
    shutil.rmtree(folder / "new", ignore_errors=True)
    assert left_names <= {".prepare.lock"} or "run.json" in left_names, (
        f"a refused start leaves {left_names}"
    )
    assert len(error) < 700
    assert re.search(says, error)
    assert sorted(folder.rglob("*")) == paths
    sentence = re.sub(r"(?<![:/\w])/\S*/(?=[\w.-]+)", "", error.removeprefix("anlit: error: "))
    rows.append([code(f"anlit {typed}"), "2", code(sentence)])


def test_a_right_study_passes(folder: Path, monkeypatch, capsys) -> None:
    """`anlit study` reads the configuration of every run before the first run starts."""
    monkeypatch.chdir(folder)
    assert main(["study", "--config", "study.yaml", "--dry_run", "--slurm=--ntasks=1"]) == 0
    assert "tuning: 2 runs" in capsys.readouterr().out


def test_every_command_has_a_mistake() -> None:
    commands = {typed.split()[0] for typed, _ in (*FAST, *SLOW)}

    assert commands >= set(COMMANDS)

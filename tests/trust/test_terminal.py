"""No terminal code of a foreign name, text or tokenizer reaches the terminal, and no unforeseen error a user's eyes."""

import json
from pathlib import Path

import pytest
import torch

from anlit.cli import main
from anlit.reporting.text import KEPT, echo, json_line, without_control_codes
from tests.checkpoints.foreign import trained
from tests.evaluation.saved import TEXTS

CODES = "\x1b[2J\x9b31m\u202e\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose folder's name clears the screen."""
    return trained(tmp_path_factory.mktemp("terminal") / f"a{CODES}", "GPT")


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    """One that names no tokenizer, so that any will do, and beside it one whose decoder makes terminal codes."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["anlit"]["data"] = None
    torch.save(content, run.parent / "a.ckpt")
    tokenizer = json.loads((run.parent / "tokenizer.json").read_text())
    letter = {"type": "Replace", "pattern": {"Regex": "[a-zA-Z]"}, "content": CODES}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], letter]}
    (run.parent / "evil.json").write_text(json.dumps(tokenizer))
    return run.parent / "a.ckpt"


def printed(capfd, *arguments: object) -> str:
    capfd.readouterr()
    main([str(argument) for argument in arguments])
    output = capfd.readouterr()
    return output.out + output.err


@pytest.mark.parametrize("more", [["--samples", "2"], ["--json"]])
def test_a_tokenizer_writes_no_terminal_codes(more: list[str], checkpoint: Path, capfd) -> None:
    given = [
        "generate",
        checkpoint,
        "a the",
        "--tokenizer",
        checkpoint.with_name("evil.json"),
        "--device",
        "cpu",
    ]
    text = printed(capfd, *given, "--max_tokens", "30", *more)
    assert "error" not in text
    assert not {*CODES} - {*"[2J31m"} & {*text}
    if more == ["--json"]:
        assert CODES in json.loads(text.splitlines()[-1])["text"]
    else:
        assert r"\x1b[2J\x9b31m\u202e\x07" in text


COMMANDS = [
    "compare {run} --output {evil}/out", "generate {run} the --max_tokens 3", "export {run} --output {evil}/out",
    "lengths {run} --output {evil}/out --lengths 16,32", "score {run} {evil}.txt --output {evil}/s.parquet",
    "validate --config={run}/config.yaml --run_dir={run} --trainer.accelerator=cpu",
    "fit --config={run}/config.yaml --run_dir={run}", "generate {evil} the",
    "prepare TextFiles --source {evil} --output {evil}/out --vocab_size 300", "import {evil} --output {evil}/out",
]  # fmt: skip
"""On the folder `evil`; the run's name is evil too."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_s_name_writes_no_terminal_codes(
    command: str, run: Path, tmp_path: Path, capfd
) -> None:
    (evil := tmp_path / f"c{CODES}").mkdir()
    (evil / "bad.jsonl").write_text("{")
    (tmp_path / f"c{CODES}.txt").write_text(TEXTS[0] * 20)
    text = printed(capfd, *command.format(run=run, evil=evil).split())
    assert text
    assert text == without_control_codes(text, KEPT)


def test_no_character_is_lost_in_json() -> None:
    value = {"text": f"é漢\u200c{CODES}\U000e0001\n"}
    assert json.loads(json_line(value)) == value
    assert json_line(value) == without_control_codes(json_line(value))


def test_joiners_are_printed_as_they_are(capsys) -> None:
    echo("می\u200cخواهم\t\x1b")
    assert capsys.readouterr().out == "می\u200cخواهم\t\\x1b\n"


def test_an_unforeseen_error_names_the_file_to_report(
    run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """An optimizer of the user's own that fails in its first step."""
    lines = (
        "import torch",
        "class Broken(torch.optim.SGD):",
        " def step(self, closure=None):",
        "  {}['a\\x1b[2J']",
    )
    (tmp_path / "brokenlab.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    new = [
        f"--config={run}/config.yaml",
        f"--run_dir={tmp_path / 'new'}",
        "--model.optimizer=brokenlab.Broken",
    ]
    assert main(["fit", *new, "--import", "brokenlab"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "anlit: error: " in line]
    (file,) = (tmp_path / "new").glob("error-*.txt")
    assert "unforeseen KeyError (" in error
    assert f"brokenlab.py:4: please report it with {file}, which has the traceback" in error
    assert "\x1b" not in error
    assert "Traceback (most recent call last)" in file.read_text()


def test_a_tokenizer_that_panics_is_one_sentence(checkpoint: Path, capfd) -> None:
    tokenizer = json.loads((checkpoint.parent / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}}
    tokenizer["pre_tokenizer"] = split | {"behavior": "Isolated", "invert": False}
    (checkpoint.parent / "endless.json").write_text(json.dumps(tokenizer))
    words = [
        "generate",
        checkpoint,
        "x" * 5000,
        "--tokenizer",
        checkpoint.with_name("endless.json"),
    ]
    text = printed(capfd, *words, "--device", "cpu")
    assert "anlit: error: the tokenizer fails on a text (Onig: " in text
    assert "Traceback" not in text

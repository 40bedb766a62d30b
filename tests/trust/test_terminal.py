"""No terminal code of a foreign name, text or tokenizer reaches the terminal.

Unforeseen errors are one sentence.
"""

import json
from pathlib import Path

import pytest
import torch

from anlit.cli import main
from anlit.reporting.text import PLAIN_CONTROLS, echo, json_line, without_control_codes
from tests.checkpoints.foreign import trained
from tests.evaluation.saved import TEXTS

CODES = "\x1b[2J\x9b31m\u202e\x07"
ESCAPED_CODES = r"\x1b[2J\x9b31m\u202e\x07"
CONTROL_CHARACTERS = set("\x1b\x9b\u202e\x07")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run in a folder with a name that clears the screen."""
    return trained(tmp_path_factory.mktemp("terminal") / f"a{CODES}", "GPT")


@pytest.fixture(scope="module")
def checkpoint(run: Path) -> Path:
    """A checkpoint that accepts any tokenizer, beside one that decodes to terminal codes."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["anlit"]["data"] = None
    torch.save(content, run.parent / "a.ckpt")
    tokenizer = json.loads((run.parent / "tokenizer.json").read_text())
    letter = {"type": "Replace", "pattern": {"Regex": "[a-zA-Z]"}, "content": CODES}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], letter]}
    (run.parent / "evil.json").write_text(json.dumps(tokenizer))
    return run.parent / "a.ckpt"


def run_anlit(capfd, *arguments: object) -> str:
    """Run a command; return all its output."""
    capfd.readouterr()
    main([str(argument) for argument in arguments])
    output = capfd.readouterr()
    return output.out + output.err


def generate(capfd, checkpoint: Path, *options: str) -> str:
    """Generate with the tokenizer that decodes to terminal codes; return all output."""
    return run_anlit(
        capfd,
        "generate",
        checkpoint,
        "a the",
        f"--tokenizer={checkpoint.with_name('evil.json')}",
        "--device=cpu",
        "--max_tokens=30",
        *options,
    )


def test_a_tokenizer_writes_no_terminal_codes(checkpoint: Path, capfd) -> None:
    text = generate(capfd, checkpoint, "--samples=2")

    assert "error" not in text
    assert not CONTROL_CHARACTERS & set(text)
    assert ESCAPED_CODES in text


def test_json_has_a_tokenizer_s_terminal_codes_as_escapes(checkpoint: Path, capfd) -> None:
    text = generate(capfd, checkpoint, "--json")

    assert not CONTROL_CHARACTERS & set(text)
    assert CODES in json.loads(text.splitlines()[-1])["text"]


COMMANDS = [
    "compare {run} --output {evil}/out",
    "generate {run} the --max_tokens 3",
    "export {run} --output {evil}/out",
    "lengths {run} --output {evil}/out --lengths 16,32",
    "score {run} {evil}.txt --output {evil}/s.parquet",
    "validate --config={run}/config.yaml --run_dir={run} --trainer.accelerator=cpu",
    "fit --config={run}/config.yaml --run_dir={run}",
    "generate {evil} the",
    "prepare TextFiles --source {evil} --output {evil}/out --vocab_size 300",
    "import {evil} --output {evil}/out",
]
"""Commands on a run and a folder `evil`; both names have terminal codes."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_s_name_writes_no_terminal_codes(
    command: str, run: Path, tmp_path: Path, capfd
) -> None:
    evil = tmp_path / f"c{CODES}"
    evil.mkdir()
    (evil / "bad.jsonl").write_text("{")
    (tmp_path / f"c{CODES}.txt").write_text(TEXTS[0] * 20)

    text = run_anlit(capfd, *command.format(run=run, evil=evil).split())

    assert text
    assert text == without_control_codes(text, PLAIN_CONTROLS)


def test_no_character_is_lost_in_json() -> None:
    value = {"text": f"é漢\u200c{CODES}\U000e0001\n"}
    assert json.loads(json_line(value)) == value
    assert json_line(value) == without_control_codes(json_line(value))


def test_joiners_are_not_escaped(capsys) -> None:
    echo("می\u200cخواهم\t\x1b")
    assert capsys.readouterr().out == "می\u200cخواهم\t\\x1b\n"


BROKEN_OPTIMIZER = r"""
import torch
class Broken(torch.optim.SGD):
    def step(self, closure=None):
        {}["a\x1b[2J"]
"""


def test_an_unforeseen_error_names_the_file_to_report(
    run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "brokenlab.py").write_text(BROKEN_OPTIMIZER)
    monkeypatch.syspath_prepend(str(tmp_path))
    fit = [
        "fit",
        f"--config={run}/config.yaml",
        f"--run_dir={tmp_path / 'new'}",
        "--model.optimizer=brokenlab.Broken",
        "--import=brokenlab",
    ]

    assert main(fit) == 1

    (error,) = [line for line in capsys.readouterr().err.splitlines() if "anlit: error: " in line]
    (file,) = (tmp_path / "new").glob("error-*.txt")
    assert "unforeseen KeyError (" in error
    assert f"brokenlab.py:5: correct this line, or report it with {file}, which has" in error
    assert "\x1b" not in error
    assert "Traceback (most recent call last)" in file.read_text()


def test_a_tokenizer_that_panics_is_one_sentence(checkpoint: Path, capfd) -> None:
    tokenizer = json.loads((checkpoint.parent / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}}
    tokenizer["pre_tokenizer"] = split | {"behavior": "Isolated", "invert": False}
    (checkpoint.parent / "endless.json").write_text(json.dumps(tokenizer))
    option = f"--tokenizer={checkpoint.with_name('endless.json')}"

    text = run_anlit(capfd, "generate", checkpoint, "x" * 5000, option, "--device=cpu")

    assert "anlit: error: the tokenizer fails on a text (Onig: " in text
    assert "Traceback" not in text

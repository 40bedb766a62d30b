"""Options of the tools: spelled as LightningCLI spells them, refused in one sentence."""

import re

import pytest

from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands.benchmark import BENCHMARKS

TOOLS = [[name] for name in COMMANDS if name not in (*LIGHTNING, "benchmark")]
TOOLS += [["benchmark", name] for name in BENCHMARKS]


@pytest.mark.parametrize("command", TOOLS, ids=" ".join)
def test_options_are_spelled_with_underscores(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said))
    assert "--help" in options
    assert [option for option in options if "-" in option[2:]] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("score run text --output f --batch-size 2", "--batch-size is not an option of anlit score: did you mean --ba"),
        ("score run text --output f --batch 2", "--batch is not an option of anlit score"),
        ("score run text --output f --length ten", "--length ten is of the wrong type: give an integer"),
        ("score run", "anlit score needs FILE and --output: anlit score --help lists the options"),
        ("prepare FineWeb --on_bad ignore", "--on_bad ignore is not known: choose one of stop, skip"),
        ("export run there --output d", "anlit export does not know what to do with there"),
        ("generate run --top_p", "--top_p expected one argument"),
        ("size --gpus many", "--gpus many is of the wrong type: give an integer"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"anlit: error: {says}")
    assert said.err.count("\n") == 1

"""What `import anlit` offers, how tools spell their options, and what a command imports before it can answer."""

import re
import subprocess
import sys

import pytest

import anlit
from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands.benchmark import BENCHMARKS

TOOLS = [name for name in COMMANDS if name not in LIGHTNING]
HEAVY = (
    "scipy.signal",
    "scipy.integrate",
    "transformers",
    "torchvision",
    "matplotlib.pyplot",
    "tensorboard.summary",
    "torchao",
)
PROGRAM = """
import contextlib, io, sys
from anlit.cli import main
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(words.split())
    print(words, ":", *sys.modules)
"""


def imported(*lines: str) -> dict[str, set[str]]:
    """The modules of a process after each of these command lines."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, check=True
    )
    return {
        line: set(names.split())
        for line, names in (said.split(" :") for said in done.stdout.splitlines())
    }


def test_the_parser_imports_no_library_that_it_does_not_use() -> None:
    (modules,) = imported("fit --model AnGPT --data PythonSources --print_config").values()
    assert "lightning" in modules
    assert modules.isdisjoint(HEAVY)


def test_help_and_wrong_options_of_a_tool_need_no_torch() -> None:
    wrong = ("generate nowhere hello", "score nowhere a.txt --output b", "lengths nowhere --output b", "size --gpus 0",
             "export nowhere --output b", "size", "study --config nowhere.yaml", "compare nowhere --output b",
             "prepare Nonesuch")  # fmt: skip
    modules = imported("--help", *(f"{tool} --help" for tool in TOOLS), *wrong)
    assert [line for line in modules if "torch" in modules[line]] == []


def test_torchmetrics_is_whole_for_whoever_asks() -> None:
    program = (
        "from anlit.training.lazy_torchmetrics import make_torchmetrics_lazy; make_torchmetrics_lazy()\n"
        "import torchmetrics, sys; from torchmetrics import MetricCollection, Metric\n"
        "assert 'torchmetrics.classification' not in sys.modules\n"
        "from torchmetrics import Accuracy, MetricCollection as again\n"
        "assert again is MetricCollection\n"
        "assert issubclass(torchmetrics.MeanSquaredError, Metric), torchmetrics.__version__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_dir_shows_the_classes() -> None:
    assert {"AnGPT", "GPT", "NGPT", "RoPE", "TextFiles", "load_checkpoint", "__version__"} <= set(
        dir(anlit)
    )


@pytest.mark.parametrize("command", [*TOOLS, *(f"benchmark {name}" for name in BENCHMARKS)])
def test_options_are_spelled_with_underscores(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    said = re.sub(r'"[^"]*"', "", capsys.readouterr().out)  # examples of other programs' options
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said))
    assert "--help" in options
    assert [option for option in options if "-" in option[2:]] == []

"""What `import anlit` offers, how tools spell their options, and what a command imports before it can answer."""

import re
import subprocess
import sys

import pytest

import anlit
from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands.benchmark import BENCHMARKS

HEAVY = ("scipy.signal", "scipy.integrate", "transformers", "torchvision", "tensorboard.summary", "torchao")
PROGRAM = """
import sys
from anlit.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *sys.modules)
"""


def test_the_parser_imports_no_library_that_it_does_not_use() -> None:
    words = "fit --model AnGPT --data PythonSources --print_config"
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=True)
    modules = set(done.stdout.rsplit("imported:", 1)[1].split())
    assert "lightning" in modules
    assert [name for name in HEAVY if name in modules] == []


WITHOUT_TORCH = """
import contextlib, io, sys
from anlit.cli import main
for words in sys.argv[1].split(", "):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(words.split())
        except SystemExit:
            pass
    assert "torch" not in sys.modules, words
"""


def test_help_and_wrong_options_of_a_tool_need_no_torch() -> None:
    tools = [name for name in COMMANDS if name not in LIGHTNING]
    wrong = ("generate nowhere hello", "score nowhere a.txt --output b", "lengths nowhere --output b", "size --gpus 0",
             "export nowhere --output b", "size", "study --config nowhere.yaml", "compare nowhere --output b",
             "prepare Nonesuch")  # fmt: skip
    words = ", ".join(["--help", *(f"{tool} --help" for tool in tools), *wrong])
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, words], check=True)


def test_torchmetrics_is_whole_for_whoever_asks() -> None:
    program = (
        "from anlit.lazy_torchmetrics import make_torchmetrics_lazy; make_torchmetrics_lazy()\n"
        "import torchmetrics, sys; from torchmetrics import MeanMetric, Metric\n"
        "assert issubclass(MeanMetric, Metric) and 'torchmetrics.classification' not in sys.modules\n"
        "from torchmetrics import Accuracy, MeanMetric as again\n"
        "assert again is MeanMetric and issubclass(torchmetrics.MeanSquaredError, Metric), torchmetrics.__version__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_dir_shows_the_classes() -> None:
    assert {"AnGPT", "GPT", "NGPT", "RoPE", "TextFiles", "load_checkpoint", "__version__"} <= set(dir(anlit))


TOOLS = [[name] for name in COMMANDS if name not in (*LIGHTNING, "benchmark")]
TOOLS += [["benchmark", name] for name in BENCHMARKS]


@pytest.mark.parametrize("command", TOOLS, ids=" ".join)
def test_options_are_spelled_with_underscores(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    said = re.sub(r'"[^"]*"', "", capsys.readouterr().out)  # examples of other programs' options
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said))
    assert "--help" in options
    assert [option for option in options if "-" in option[2:]] == []

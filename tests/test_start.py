"""What a command imports before it can answer: packages that take seconds are for what uses them."""

import subprocess
import sys

import pytest

HEAVY = (
    "scipy.signal",
    "scipy.integrate",
    "transformers",
    "torchvision",
    "tensorboard.summary",
    "torchao",
)
PROGRAM = """
import sys
from anlit.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("imported:", *sys.modules)
"""


def imported(words: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("imported:", 1)[1].split())


def test_the_parser_imports_no_library_that_it_does_not_use() -> None:
    found = imported("fit --model AnGPT --data PythonSources --print_config")
    assert "lightning" in found
    assert [name for name in HEAVY if name in found] == []


@pytest.mark.parametrize(
    "words",
    [
        *("prepare --help", "study --help", "compare --help", "generate --help", "score --help", "export --help"),
        *("import --help", "explore --help", "evaluate --help", "lengths --help", "needle --help", "benchmark --help"),
    ],
)
def test_the_help_of_a_tool_needs_no_torch(words: str) -> None:
    assert "torch" not in imported(words)


def test_torchmetrics_is_whole_for_whoever_asks() -> None:
    program = (
        "from anlit.lazy_torchmetrics import make_torchmetrics_lazy; make_torchmetrics_lazy()\n"
        "import torchmetrics, sys; from torchmetrics import MeanMetric, Metric\n"
        "assert issubclass(MeanMetric, Metric) and 'torchmetrics.classification' not in sys.modules\n"
        "from torchmetrics import Accuracy, MeanMetric as again\n"
        "assert again is MeanMetric and issubclass(torchmetrics.MeanSquaredError, Metric), torchmetrics.__version__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

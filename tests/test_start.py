"""The names of `import anlit`, the spelling of options, the modules that a command imports."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import anlit
from anlit.cli import COMMANDS, LIGHTNING, main
from anlit.commands.benchmark import BENCHMARKS
from anlit.commands.cpu_threads import SPINS
from anlit.commands.garbage_collection import collector_paused
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run_with_text

TOOLS = [name for name in COMMANDS if name not in LIGHTNING]
HEAVY = (
    "scipy",
    "transformers",
    "torchvision",
    "tensorboard",
    "torchao",
    "huggingface_hub",
    "pyarrow",
    "matplotlib",
)
PROGRAM = """
import contextlib, io, sys
from anlit.cli import main
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(command.split())
    print(command, ":", *sys.modules)
"""

PAUSED_COLLECTOR = """
import contextlib, gc
from anlit.commands.garbage_collection import collector_paused
with contextlib.suppress(ImportError), collector_paused():
    assert not gc.isenabled()
    import nonesuch
assert gc.isenabled()
"""

UNREADABLE_STACK = """
import inspect
inspect.stack = None
import anlit.training.models
"""

INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

module = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("anlit", run_name="__main__")
"""

THEN_TORCH = """
import contextlib, sys
from anlit.__main__ import main
sys.argv = ["anlit", "--version"]
with contextlib.suppress(SystemExit):
    main()
import torch
"""

WRONG_COMMANDS = (
    "generate nowhere hello",
    "score nowhere a.txt --output b",
    "lengths nowhere --output b",
    "size --gpus 0",
    "export nowhere --output b",
    "size",
    "study --config nowhere.yaml",
    "compare nowhere --output b",
    "prepare Nonesuch",
)


def imported(*commands: str) -> dict[str, set[str]]:
    """Return the modules of a process after each of these commands."""
    program = [sys.executable, "-c", PROGRAM, *commands]
    process = subprocess.run(program, capture_output=True, text=True, check=True)
    modules = {}
    for line in process.stdout.splitlines():
        command, names = line.split(" :")
        modules[command] = set(names.split())
    return modules


def test_the_parser_imports_no_unused_library() -> None:
    (modules,) = imported("fit --model AnGPT --data PythonSources --print_config").values()
    assert "lightning" in modules
    assert modules.isdisjoint(HEAVY)


def test_a_users_module_brings_no_unused_library(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "users_callback.py").write_text("import lightning")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    (modules,) = imported("generate --import users_callback --help").values()

    assert "lightning" in modules
    assert modules.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    ("setting", "spins"),
    [
        ({}, SPINS),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "active"}, "30000000000"),
    ],
)
def test_waiting_threads_sleep_soon_unless_the_user_decides(
    setting: dict[str, str], spins: str, monkeypatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = os.environ | setting | {"OMP_DISPLAY_ENV": "verbose"}
    program = [sys.executable, "-c", THEN_TORCH]

    process = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)

    assert f"GOMP_SPINCOUNT = '{spins}'" in process.stderr


@pytest.mark.parametrize("command", ["generate RUN cat --max_tokens 1", "validate RUN"])
def test_an_answer_needs_no_unused_library(command: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "n_layers": 1, "n_heads": 2, "d_model": 32}
    run = make_run_with_text(tmp_path, anlit.AnGPT, **sizes)
    arguments = command.replace("RUN", str(run)).split()
    program = [sys.executable, "-X", "importtime", "-m", "anlit", *arguments]

    process = subprocess.run(program, capture_output=True, text=True, check=True)

    modules = set()
    messages = []
    for line in process.stderr.splitlines():
        if line.startswith("import time:"):
            modules.add(line.rpartition("|")[2].strip())
        else:
            messages.append(line)
    assert "torch" in modules
    assert modules.isdisjoint(HEAVY)
    assert messages == []  # such as Triton's list of objects that the end has not freed


def test_models_are_imported_without_reading_the_source_of_the_stack() -> None:
    subprocess.run([sys.executable, "-c", UNREADABLE_STACK], check=True)


def test_the_garbage_collector_rests_only_during_imports() -> None:
    subprocess.run([sys.executable, "-c", PAUSED_COLLECTOR], check=True)

    with collector_paused():  # torch is imported here already
        assert gc.isenabled()


def test_help_and_wrong_options_of_a_tool_need_no_torch() -> None:
    modules = imported("--help", *(f"{tool} --help" for tool in TOOLS), *WRONG_COMMANDS)

    assert [command for command in modules if "torch" in modules[command]] == []


def test_lazy_torchmetrics_has_all_its_members_and_draws() -> None:
    program = (
        "from anlit.training.lazy_torchmetrics import make_torchmetrics_lazy\n"
        "make_torchmetrics_lazy()\n"
        "import torchmetrics, sys; from torchmetrics import MetricCollection, Metric\n"
        "assert sys.modules.keys().isdisjoint({'torchmetrics.classification', 'matplotlib'})\n"
        "from torchmetrics import Accuracy, MeanMetric, MetricCollection as again\n"
        "assert again is MetricCollection\n"
        "assert issubclass(torchmetrics.MeanSquaredError, Metric), torchmetrics.__version__\n"
        "metrics = MetricCollection({'a': MeanMetric(), 'b': MeanMetric()})\n"
        "metrics.update(1.0)\n"
        "metrics['a'].plot()[0].savefig(sys.argv[1])\n"
        "metrics.plot(together=True)[0].savefig(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, os.devnull], check=True)


def test_dir_shows_the_classes() -> None:
    assert {"AnGPT", "GPT", "NGPT", "RoPE", "TextFiles", "load_checkpoint", "__version__"} <= set(
        dir(anlit)
    )


@pytest.mark.parametrize("command", [*TOOLS, *(f"benchmark {name}" for name in BENCHMARKS)])
def test_options_are_spelled_with_underscores(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])

    assert end.value.code == 0
    text = re.sub(r'"[^"]*"', "", capsys.readouterr().out)  # without other programs' options
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert "--help" in options
    assert [option for option in options if "-" in option[2:]] == []


@pytest.mark.parametrize("command", [*TOOLS, *(f"benchmark {name}" for name in BENCHMARKS)])
def test_help_fits_a_terminal_of_80_columns(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("module", ["anlit.cli", "anlit.signals", "anlit.commands.demo"])
def test_ctrl_c_is_quiet_while_a_command_is_imported(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "demo", "--help"]

    process = subprocess.run(command, capture_output=True, text=True)

    assert process.stderr == "anlit: error: interrupted\n"
    assert process.returncode == 130

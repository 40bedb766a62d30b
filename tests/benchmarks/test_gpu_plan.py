"""`make gpu`: the real plan, without a GPU."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anlit.commands.prepare import parser as parser_of_prepare
from tests.benchmarks.gpu_calls import (
    HAS_TOOLS,
    NVIDIA_SMI_WITHOUT_A_GPU,
    ROOT,
    call,
    results,
    with_programs,
    write_plan,
    write_program,
)

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason="make, timeout or bash is missing")


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real plan."""
    monkeypatch.syspath_prepend(ROOT / "docker")
    return importlib.import_module("gpu_items")


def test_the_important_items_fit_into_two_calls_and_fifteen_minutes(items: ModuleType) -> None:
    limit = 9 * 60 - 10  # seconds of a call, without making the virtual environment
    names = [phase.items[0].name for phase in items.PLAN]
    n_important = names.index("step-scale-invariant") + 1
    first_call = 0
    second_call = 0
    for phase in items.PLAN[:n_important]:
        if first_call + phase.seconds <= limit:
            first_call += phase.seconds
        else:
            second_call += phase.seconds

    assert max(first_call, second_call) <= limit
    assert first_call + second_call < 13 * 60, "a machine takes two minutes to start and to end"


def test_wheels_for_another_python_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "outer-1-cp310-cp310-win32.whl").touch()
    write_plan(tmp_path, (60, ["'first', 'true', 'x'"]))

    code, output = call(tmp_path)

    assert code == 1
    assert "the wheels do not fit this Python" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("chosen", "expected"), [(None, "0"), ("1", "1")])
def test_items_use_one_gpu(
    chosen: str | None, expected: str, items: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    environment = gpu.environment(Path("/state"), True)

    assert environment["CUDA_VISIBLE_DEVICES"] == expected


def test_a_benchmark_ends_before_its_time(items: ModuleType) -> None:
    gpu = importlib.import_module("gpu")
    item = items.Item("step", "python -m anlit benchmark step", "x")

    command = gpu.command_of(item, {}, Path("/state"), 75)

    assert command == "python -m anlit benchmark step --output /state/step --minutes 0.95"


def commands_of(items: ModuleType, sizes: dict[str, str]) -> list[list[str]]:
    """Return the arguments of every item's anlit commands."""
    gpu = importlib.import_module("gpu")
    commands = []
    for item in items_of(items.PLAN):
        text = gpu.command_of(
            item, {"CORPUS": "PythonSources", "PEER": "litgpt"} | sizes, Path("/state"), 60
        )
        for command in re.findall(r"python -m anlit ([^\n&]+?)(?: 2>&1| &&|$)", text, re.MULTILINE):
            commands.append(shlex.split(command))
    return commands


@pytest.mark.parametrize("sizes", ["SIZES", "TOY_SIZES"])
def test_every_command_of_the_plan_is_understood(
    sizes: str,
    items: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    printed_config: Callable[..., Any],
) -> None:
    from anlit.benchmarks import attention, fit, step
    from anlit.commands import evaluations, generate, score

    parsers = {
        "prepare": parser_of_prepare(),
        "generate": generate.parser(),
        "score": score.parser(),
        "lengths": evaluations.parser("lengths"),
    }

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(step, "INSTALLED", tuple(step.PEERS))
    commands = commands_of(items, getattr(items, sizes))

    assert len(commands) > 20
    names = set()
    for command in commands:
        n_words = 2 if command[0] == "benchmark" else 1
        names.add(" ".join(command[:n_words]))
        match command:
            case ["benchmark", "step", *options]:
                assert step.parse_options(options).minutes < 1
            case ["benchmark", "fit", *options]:
                arguments = fit.fit_parser().parse_args(options).arguments
                assert printed_config(*arguments)["run_dir"].startswith("/state/")
            case ["benchmark", "attention", *options]:
                monkeypatch.setattr(attention, "Benchmark", stop_after_parsing)
                with pytest.raises(ParsedError):
                    attention.main(options)
            case ["fit", *options]:
                config = printed_config(*options)
                assert config["run_dir"].startswith("/state/")
                assert config["trainer"]["max_steps"] <= 300
            case ["compare", *options]:
                assert len(options) == 5
            case ["validate", *options]:
                assert len(options) == 1
            case [name, *options]:
                parsers[name].parse_args(options)
    benchmarks = {"benchmark step", "benchmark attention", "benchmark fit"}
    assert names == {*benchmarks, *parsers, "fit", "compare", "validate"}


class ParsedError(Exception):
    """Raised in place of a benchmark once its options are understood."""


def stop_after_parsing(*arguments: object) -> None:
    raise ParsedError


def test_without_a_gpu_items_of_the_plan_run_at_toy_sizes(tmp_path: Path) -> None:
    """An item of each kind. The test of the whole plan is slow."""
    names = ("prepare", "attention-4k", "fit", "learn-gpt", "tests-models")
    (tmp_path / "plan.py").write_text(
        "from gpu_items import PLAN as WHOLE, SIZES, TOY_SIZES, Phase\n"
        "items = [item for phase in WHOLE for item in phase.items]\n"
        f"PLAN = [Phase(500, [item for item in items if item.name in {names}])]\n"
    )

    code, output = call(tmp_path, nvidia_smi=NVIDIA_SMI_WITHOUT_A_GPU)

    page = (tmp_path / "output-dry" / "gpu.md").read_text()
    assert code == 0, output
    expected = dict.fromkeys(names, "finished") | {"tests-models": "no device"}
    assert results(tmp_path, "output-dry") == expected, page
    assert "No GPU: toy sizes on a CPU" in page
    assert "| plain, sdpa |" in page
    assert "fit ÷ bare" in page
    assert "| train/tokens_per_second | train/data_wait_share | val/loss |" in page


@pytest.mark.slow
def test_every_pytest_item_selects_tests(items: ModuleType) -> None:
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu"]
    commands = [item.command for item in items_of(items.PLAN) if "$PYTEST" in item.command]

    assert len(commands) == 5
    for command in commands:
        arguments = shlex.split(command.replace("$PYTEST", ""))
        subprocess.run([*collect, *arguments], cwd=ROOT, check=True)


def items_of(phases: list[Any]) -> list[Any]:
    items = []
    for phase in phases:
        items += phase.items
    return items


@pytest.mark.slow
def test_without_a_gpu_the_whole_plan_is_measured_or_says_why_not(
    tmp_path: Path, items: ModuleType
) -> None:
    """As a user calls it in a clone."""
    write_program(tmp_path / "nvidia-smi", NVIDIA_SMI_WITHOUT_A_GPU)
    settings = [
        f"STATE={tmp_path}/state",
        f"OUTPUT={tmp_path}/output",
        f"WHEELS={tmp_path}/none",
        f"GPU_PYTHON={sys.executable}",
    ]
    command = ["make", "gpu", *settings]
    subprocess.run(command, cwd=ROOT, env=with_programs(tmp_path), check=True)

    page = (tmp_path / "output-dry" / "gpu.md").read_text()
    names = [item.name for item in items_of(items.PLAN)]
    outcomes = results(tmp_path, "output-dry")
    assert list(outcomes) == names
    assert set(outcomes.values()) == {"finished", "no device"}, page
    for name, outcome in outcomes.items():
        if outcome == "finished" and name not in ("prepare", "fit", "tools"):
            section = page.partition(f"## {name}:")[2].partition("\n## ")[0]
            assert "\n| " in section, f"{name} wrote no table"
    assert (tmp_path / "output-dry" / "convergence.png").exists()


def test_a_copy_inside_another_repository_does_not_take_its_commit(
    tmp_path: Path, items: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_results = importlib.import_module("gpu_results")
    copy = tmp_path / "copy"
    (copy / "docker").mkdir(parents=True)
    (copy / "docker" / "gpu.py").touch()
    name = ["-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run(["git", "-C", tmp_path, "init", "--quiet"], check=True)
    commit = ["git", "-C", tmp_path, *name, "commit", "--quiet", "--allow-empty", "--message=x"]
    subprocess.run(commit, check=True)
    monkeypatch.setattr(gpu_results, "ROOT", copy)
    monkeypatch.setenv("ANLIT_COMMIT", "abc")

    assert gpu_results.commit() == "abc"

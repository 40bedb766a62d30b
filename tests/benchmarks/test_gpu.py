"""`make gpu`: toy plans with failing, overrunning and killed items; the real plan without a GPU."""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anlit.commands.prepare import parser as parser_of_prepare

ROOT = Path(__file__).parents[2]
HAS_TOOLS = all(map(shutil.which, ("make", "timeout", "bash")))
pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason="make, timeout or bash is missing")

NVIDIA_SMI = """#!/bin/sh
case "$1" in
*=name,driver*) echo "NVIDIA H200, 580.159.04, 1980, 345, 700.00" ;;
*=memory.total) echo 143771 ;;
*) echo "NVIDIA H200" ;;
esac
"""
NVIDIA_SMI_WITHOUT_A_GPU = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""
PRINTED_PLAN = """\
The plan: 350 s at most, in calls of 540 s.
   0–170 s  fails
 170–230 s  gpu
 230–290 s  unable
 290–350 s  last
"""
GPU_OF_THE_PAGE = (
    "NVIDIA H200, driver 580.159.04, clock 1980 MHz at most, 345 MHz at the start, 700.00 W;"
)


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The real plan."""
    monkeypatch.syspath_prepend(ROOT / "docker")
    return importlib.import_module("gpu_items")


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def with_programs(folder: Path) -> dict[str, str]:
    """Return the environment with these programs first."""
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def start(
    folder: Path, *options: str, minutes: float = 9, nvidia_smi: str = NVIDIA_SMI
) -> subprocess.Popen[str]:
    """Start a call in a new process group, on a machine with this program nvidia-smi."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    write_program(programs / "nvidia-smi", nvidia_smi)
    command = [sys.executable, "docker/gpu.py", f"--minutes={minutes}", f"--plan={folder}/plan.py"]
    for name in ("state", "output", "wheels"):
        command.append(f"--{name}={folder / name}")
    return subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=with_programs(programs),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def call(folder: Path, *options: str, **settings: Any) -> tuple[int, str]:
    """Return the exit code and the output of a call."""
    process = start(folder, *options, **settings)
    output, _ = process.communicate()
    return process.returncode, output


def write_plan(folder: Path, *phases: tuple[int, list[str]]) -> None:
    """Write a plan from phases: seconds, and Python's text of each item's arguments."""
    lines = ["from gpu_items import Item, Phase", "SIZES = {}", "TOY_SIZES = {}", "PLAN = ["]
    for seconds, items in phases:
        members = ", ".join(f"Item({item})" for item in items)
        lines.append(f"    Phase({seconds}, [{members}]),")
    (folder / "plan.py").write_text("\n".join([*lines, "]", ""]))


def has_ended(pid_file: Path) -> bool:
    status = Path(f"/proc/{pid_file.read_text().strip()}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def results(folder: Path, output: str = "output") -> dict[str, str]:
    """Return the result of each item."""
    lines = (folder / output / "gpu.jsonl").read_text().splitlines()
    return {record["item"]: record["result"] for record in map(json.loads, lines)}


def test_results_are_written_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script"  # called as: script anlit benchmark --output OUT
    script.write_text(
        "echo '{\n\"loss\": 7}' > $4/a.json\n"
        "printf '# title\\n\\n## Table\\n\\n| a |\\n' > $4/a.md\n"
    )
    write_plan(
        tmp_path,
        (170, ["'fails', 'echo a reason; exit 3', 'what fails'"]),
        (60, ["'gpu', 'true', 'x', needs=('device',)"]),
        (60, ["'unable', 'true', 'x', needs=('no_such_program',)"]),
        (60, [f"'last', 'sh {script} anlit benchmark', 'what it is'"]),
    )

    code, output = call(tmp_path)

    assert code == 0, output
    assert output.startswith(PRINTED_PLAN)
    assert "All items have a result" in output
    assert "Not finished: fails. AGAIN=failed repeats them." in output
    assert results(tmp_path) == {
        "fails": "failed (3)",
        "gpu": "finished",
        "unable": "left out: no_such_program is not here",
        "last": "finished",
    }
    assert '"record": {"loss": 7}' in (tmp_path / "output" / "gpu.jsonl").read_text()
    page = (tmp_path / "output" / "gpu.md").read_text()
    for text in ("## last: what it is", "### Table\n\n| a |", "a reason", "| unable | left out"):
        assert text in page
    assert "# title" not in page

    head = page.splitlines()[2]
    assert head.startswith(GPU_OF_THE_PAGE)
    assert re.search(r"Python 3\.\S+, torch 2\.\S+, .* commit \w+, \d{4}-\d\d-\d\d\.$", head)


def test_the_next_call_skips_what_is_finished_until_it_is_asked_for(tmp_path: Path) -> None:
    write_plan(
        tmp_path,
        (60, [f"'counts', 'printf x >> {tmp_path}/count', 'x'"]),
        (60, ["'fails', 'false', 'x'"]),
    )

    for again, expected in (("", "x"), ("", "x"), ("counts", "xx"), ("failed", "xx")):
        call(tmp_path, f"--again={again}")
        assert (tmp_path / "count").read_text() == expected
    assert set(results(tmp_path)) == {"counts", "fails"}


def test_a_new_output_folder_gets_the_results_of_earlier_calls(tmp_path: Path) -> None:
    write_plan(tmp_path, (60, ["'first', 'true', 'x'"]))
    call(tmp_path)
    shutil.rmtree(tmp_path / "output")

    call(tmp_path)

    assert results(tmp_path) == {"first": "finished"}
    assert "| first | finished |" in (tmp_path / "output" / "gpu.md").read_text()


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


def test_a_phase_over_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    write_plan(
        tmp_path,
        (2, [f"'long', 'sleep 100 & echo $! > {tmp_path}/pid; echo so far; wait', 'x'"]),
        (60, ["'next', 'true', 'x'"]),
    )

    call(tmp_path)

    assert results(tmp_path) == {"long": "over its time", "next": "finished"}
    assert "so far" in (tmp_path / "output" / "gpu.md").read_text()
    assert has_ended(tmp_path / "pid")


def test_a_phase_that_does_not_fit_into_a_call_is_left_to_the_next(tmp_path: Path) -> None:
    write_plan(
        tmp_path,
        (50, ["'first', 'true', 'x'"]),
        (500, ["'large', 'true', 'x'"]),
        (40, ["'small', 'true', 'x'"]),
        (40, ["'reads', 'true', 'x', inputs=('large',)"]),
    )

    code, output = call(tmp_path, minutes=1)

    assert code == 75
    assert "Call make gpu again for: large, reads." in output
    assert results(tmp_path) == {"first": "finished", "small": "finished"}

    code, _ = call(tmp_path)

    assert code == 0
    assert set(results(tmp_path).values()) == {"finished"}


def test_items_of_a_phase_run_beside_each_other_as_far_as_memory_allows(tmp_path: Path) -> None:
    def meets(name: str, partner: str) -> str:
        command = f"touch {tmp_path}/{name}; until [ -e {tmp_path}/{partner} ]; do sleep 0.1; done"
        return f"'{name}', '{command}', 'x', gigabytes=60"

    alone = f"mkdir {tmp_path}/busy && sleep 0.5 && rmdir {tmp_path}/busy"
    write_plan(
        tmp_path,
        (30, [meets("a", "b"), meets("b", "a")]),
        (60, [f"'c', '{alone}', 'x', gigabytes=70", f"'d', '{alone}', 'x', gigabytes=70"]),
    )

    _, output = call(tmp_path)

    assert set(results(tmp_path).values()) == {"finished"}, output


def test_an_item_waits_for_its_inputs_and_is_left_out_without_them(tmp_path: Path) -> None:
    reads = f"cat {tmp_path}/state/slow/file"
    items = [
        f"'reads', '{reads}', 'x', inputs=('slow',)",
        "'slow', 'sleep 0.5; echo text > $OUT/file', 'x'",
        "'fails', 'false', 'x'",
        "'needs', 'true', 'x', inputs=('fails',)",
    ]
    write_plan(tmp_path, (60, items))

    call(tmp_path)

    expected = {"reads": "finished", "slow": "finished", "fails": "failed (1)"}
    assert results(tmp_path) == expected | {"needs": "left out: fails is not finished"}


def test_the_page_has_the_speed_of_a_run_and_the_archive_no_checkpoint(tmp_path: Path) -> None:
    table = ["train/tokens_per_second,train/mfu,train/data_wait_share,val/loss"]
    table += ["10,0.1,0.5,", ",,,4.5", "800,0.3,0.02,", ",,,4.25", "800,0.3,0.02,"]
    (tmp_path / "metrics.csv").write_text("\n".join([*table, ""]))
    run = "mkdir -p $OUT/run/checkpoints && touch $OUT/run/checkpoints/last.ckpt"
    write_plan(tmp_path, (60, [f"'fit', '{run} && cp {tmp_path}/metrics.csv $OUT/run', 'x'"]))

    call(tmp_path)

    page = (tmp_path / "output" / "gpu.md").read_text()
    assert "| train/tokens_per_second | train/mfu | train/data_wait_share | val/loss |" in page
    assert "| 800 | 0.3 | 0.02 | 4.25 |" in page
    with tarfile.open(tmp_path / "output" / "gpu.tar.gz") as archive:
        names = archive.getnames()
    assert "fit/run/metrics.csv" in names
    assert not [name for name in names if "checkpoints" in name]


def test_a_killed_call_leaves_whole_files_and_the_next_one_waits_for_its_item(
    tmp_path: Path,
) -> None:
    busy = tmp_path / "busy"
    go = tmp_path / "go"
    command = f"touch {busy}; until [ -e {go} ]; do sleep 0.1; done; rm {busy}"
    items = ["'first', 'true', 'x'"], [f"'busy', '{command}', 'what it does'"]
    write_plan(tmp_path, *((60, item) for item in items))

    process = start(tmp_path)
    while not busy.exists():
        assert process.poll() is None, "the call ended before its item began"
        time.sleep(0.01)
    process.kill()
    process.communicate()

    assert results(tmp_path) == {"first": "finished"}
    assert "| busy | waiting |" in (tmp_path / "output" / "gpu.md").read_text()

    process = start(tmp_path)
    assert process.stdout
    assert "still runs: waiting for its end" in process.stdout.readline()
    go.touch()
    process.communicate()

    assert process.returncode == 0
    assert results(tmp_path) == {"first": "finished", "busy": "finished"}


def test_a_call_that_is_terminated_ends_its_item(tmp_path: Path) -> None:
    write_plan(tmp_path, (60, [f"'long', 'echo $$ > {tmp_path}/pid; sleep 100; true', 'x'"]))
    pid_file = tmp_path / "pid"

    process = start(tmp_path)
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.01)
    process.terminate()
    process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    assert has_ended(pid_file)


def test_the_pth_file_of_a_wheel_is_read(tmp_path: Path) -> None:
    """Without the file of nvidia-cutlass-dsl, `import cutlass` fails."""
    (tmp_path / "wheels").mkdir()
    metadata = "Metadata-Version: 2.1\nName: outer\nVersion: 1\n"
    members = {
        "outer.pth": "outer/inside\n",
        "outer/inside/inner_of_the_wheel.py": "",
        "outer-1.dist-info/METADATA": metadata,
        "outer-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "outer-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "wheels" / "outer-1-py3-none-any.whl", "w") as wheel:
        for name, text in members.items():
            wheel.writestr(name, text)
    command = 'python -c "import inner_of_the_wheel, torch, anlit"'
    write_plan(tmp_path, (120, [f"'imports', '{command}', 'x'"]))

    _, output = call(tmp_path)

    page = (tmp_path / "output" / "gpu.md").read_text()
    assert results(tmp_path) == {"imports": "finished"}, output + page


def test_the_important_items_fit_into_two_calls_and_fifteen_minutes(items: ModuleType) -> None:
    limit = 9 * 60 - 10  # seconds of a call, without making the virtual environment
    names = [phase.items[0].name for phase in items.PLAN]
    n_important = names.index("step-litgpt") + 1
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

    assert command.endswith("--output /state/step --minutes 0.95")


def commands_of(items: ModuleType, sizes: dict[str, str]) -> list[list[str]]:
    """Return the arguments of every item's anlit commands."""
    gpu = importlib.import_module("gpu")
    commands = []
    for item in items_of(items.PLAN):
        text = gpu.command_of(item, {"CORPUS": "PythonSources"} | sizes, Path("/state"), 60)
        for command in text.split(" && "):
            program, option, module, *arguments = shlex.split(command)
            if [program, option, module] == ["python", "-m", "anlit"]:
                commands.append(arguments)
    return commands


@pytest.mark.parametrize("sizes", ["SIZES", "TOY_SIZES"])
def test_every_command_of_the_plan_is_understood(
    sizes: str,
    items: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    printed_config: Callable[..., Any],
) -> None:
    from anlit.benchmarks import attention, step

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
            case ["benchmark", "attention", *options]:
                monkeypatch.setattr(attention, "Benchmark", stop_after_parsing)
                with pytest.raises(ParsedError):
                    attention.main(options)
            case ["fit", *options]:
                config = printed_config(*options)
                assert config["run_dir"].startswith("/state/")
                assert config["trainer"]["max_steps"] <= 200
            case ["prepare", *options]:
                parser_of_prepare().parse_args(options)
            case ["compare", *options]:
                assert len(options) == 5
    assert names == {"benchmark step", "benchmark attention", "fit", "prepare", "compare"}


class ParsedError(Exception):
    """Raised in place of a benchmark once its options are understood."""


def stop_after_parsing(*arguments: object) -> None:
    raise ParsedError


def test_without_a_gpu_items_of_the_plan_run_at_toy_sizes(tmp_path: Path) -> None:
    """An item of each kind. The test of the whole plan is slow."""
    names = ("prepare", "attention-4k", "fit", "tests-models")
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
        if outcome == "finished" and name != "prepare":
            section = page.partition(f"## {name}:")[2].partition("\n## ")[0]
            assert "\n| " in section, f"{name} wrote no table"
    assert (tmp_path / "output-dry" / "convergence.png").exists()

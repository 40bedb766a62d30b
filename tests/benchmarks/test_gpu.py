"""`make gpu`: toy plans with failing, overrunning and killed items."""

import re
import shutil
import signal
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.benchmarks.gpu_calls import (
    GPU_OF_THE_PAGE,
    HAS_TOOLS,
    PRINTED_PLAN,
    call,
    has_ended,
    results,
    start,
    write_plan,
)
from tests.data.processes import wait_for

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason="make, timeout or bash is missing")


def test_results_are_written_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script"  # called as: script anlit benchmark step --output OUT
    script.write_text(
        "echo '{\n\"loss\": 7}' > $5/a.json\n"
        "printf '# title\\n\\n## Table\\n\\n| a |\\n' > $5/a.md\n"
    )
    write_plan(
        tmp_path,
        (170, ["'fails', 'echo a reason; exit 3', 'what fails'"]),
        (60, ["'gpu', 'true', 'x', needs=('device',)"]),
        (60, ["'unable', 'true', 'x', needs=('no_such_program',)"]),
        (60, [f"'last', 'sh {script} anlit benchmark step', 'what it is'"]),
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


def test_what_the_compiler_chose_beside_other_items_is_chosen_again(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "caches" / "inductor" / "ab"
    choose = f"mkdir -p {folder} && touch {folder}/kernel.py {folder}"
    write_plan(
        tmp_path,
        (60, [f"'first', '{choose}/first.best_config', 'x'", "'second', 'true', 'x'"]),
        (60, [f"'alone', '{choose}/alone.best_config', 'x'"]),
    )

    call(tmp_path)

    assert {path.name for path in folder.iterdir()} == {"kernel.py", "alone.best_config"}


def test_a_new_output_folder_gets_the_results_of_earlier_calls(tmp_path: Path) -> None:
    write_plan(tmp_path, (60, ["'first', 'true', 'x'"]))
    call(tmp_path)
    shutil.rmtree(tmp_path / "output")

    call(tmp_path)

    assert results(tmp_path) == {"first": "finished"}
    assert "| first | finished |" in (tmp_path / "output" / "gpu.md").read_text()


def test_a_phase_over_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    write_plan(
        tmp_path,
        (8, [f"'long', 'sleep 600 & echo $! > {tmp_path}/pid; echo so far; wait', 'x'"]),
        (60, ["'next', 'true', 'x'"]),
    )

    call(tmp_path)

    assert results(tmp_path) == {"long": "over its time", "next": "finished"}
    assert "so far" in (tmp_path / "output" / "gpu.md").read_text()
    wait_for(lambda: has_ended(tmp_path / "pid"))


def test_a_phase_that_does_not_fit_into_a_call_is_left_to_the_next(tmp_path: Path) -> None:
    write_plan(
        tmp_path,
        (1000, ["'first', 'true', 'x'"]),
        (10_000, ["'large', 'true', 'x'"]),
        (1000, ["'small', 'true', 'x'"]),
        (1000, ["'reads', 'true', 'x', inputs=('large',)"]),
    )

    code, output = call(tmp_path, minutes=30)

    assert code == 75
    assert "Call make gpu again for: large, reads." in output
    assert results(tmp_path) == {"first": "finished", "small": "finished"}

    code, _ = call(tmp_path, minutes=300)

    assert code == 0
    assert set(results(tmp_path).values()) == {"finished"}


def test_items_of_a_phase_run_beside_each_other_as_far_as_memory_allows(tmp_path: Path) -> None:
    def meets(name: str, partner: str) -> str:
        command = f"touch {tmp_path}/{name}; until [ -e {tmp_path}/{partner} ]; do sleep 0.1; done"
        return f"'{name}', '{command}', 'x', gigabytes=60"

    alone = f"mkdir {tmp_path}/busy && sleep 0.5 && rmdir {tmp_path}/busy"
    write_plan(
        tmp_path,
        (240, [meets("a", "b"), meets("b", "a")]),
        (240, [f"'c', '{alone}', 'x', gigabytes=70", f"'d', '{alone}', 'x', gigabytes=70"]),
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
    wait_for(busy.exists)
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
    write_plan(tmp_path, (60, [f"'long', 'sleep 600 & echo $! > {tmp_path}/pid; wait', 'x'"]))
    pid_file = tmp_path / "pid"

    process = start(tmp_path)
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    process.terminate()
    process.communicate()

    assert process.returncode == 128 + signal.SIGTERM
    wait_for(lambda: has_ended(pid_file))


TERMINATED_WHILE_IT_STARTS_AN_ITEM = """
import os, signal, subprocess, time
class Popen(subprocess.Popen):
    def __init__(self, command, **settings):
        super().__init__(command, **settings)
        if "timeout" in command:
            while not os.path.exists({pid_file!r}):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
"""
"""Lines of a plan, which the call runs."""


def test_a_call_that_is_terminated_while_it_starts_an_item_ends_the_item(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = f"sleep 600 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; wait"
    write_plan(tmp_path, (60, [f"'long', '{command}', 'x'"]))
    with (tmp_path / "plan.py").open("a") as plan:
        plan.write(TERMINATED_WHILE_IT_STARTS_AN_ITEM.format(pid_file=str(pid_file)))

    code, output = call(tmp_path)

    assert code == 128 + signal.SIGTERM, output
    wait_for(lambda: has_ended(pid_file), seconds=30)


def test_the_pth_file_of_a_wheel_is_read(tmp_path: Path) -> None:
    """`import cutlass` fails without the file of nvidia-cutlass-dsl."""
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

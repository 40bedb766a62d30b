"""`anlit benchmark gpu`: a list of toy items that is killed, cut and failed; the real list rehearsed at toy sizes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anlit.benchmarks.gpu import benchmark, runner
from anlit.benchmarks.gpu.items import ITEMS
from anlit.benchmarks.gpu.runner import ATTEMPTS, FINAL, MARK, ROOT, Item, Runner
from anlit.commands.benchmark import main
from anlit.errors import UserError

WRITE = """
import json, pathlib, sys, time
time.sleep(float(sys.argv[2]))
folder = pathlib.Path(sys.argv[1])
(folder / "a.json").write_text(json.dumps({"found": 7}))
(folder / "a.md").write_text("# title\\n\\n## Table\\n\\n| a |\\n")
"""


def writes(name: str, seconds: float = 0.0, **settings: Any) -> Item:
    return Item(name, f"what {name} is", 1, (sys.executable, "-c", WRITE, "{folder}", str(seconds)), **settings)


def runs(name: str, code: str, minutes: float = 1, **settings: Any) -> Item:
    return Item(name, f"what {name} is", minutes, (sys.executable, "-c", code), **settings)


def call(folder: Path, *items: Item, seconds: float = 60, **settings: Any) -> Runner:
    for name in ("state", "output"):
        (folder / name).mkdir(exist_ok=True)
    begun = Runner(items, folder / "state", folder / "output", seconds, "the command", **settings)
    begun.run()
    return begun


def written(folder: Path) -> dict[str, Any]:
    items: dict[str, Any] = json.loads((folder / "output" / "gpu.json").read_text())["items"]
    return items


def statuses(folder: Path) -> dict[str, str]:
    return {name: result["status"] for name, result in written(folder).items()}


def test_what_items_find_is_written_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    fails = runs("fails", "import sys; print('a reason'); sys.exit(3)")
    call(tmp_path, writes("first"), fails, writes("unable", needs=("no-such-program",)), writes("last"))
    assert statuses(tmp_path) == {"first": "done", "fails": "failed", "unable": "left out", "last": "done"}
    found = written(tmp_path)
    assert found["first"]["record"] == {"found": 7}
    assert found["fails"]["exit_code"] == 3
    text = (tmp_path / "output" / "gpu.md").read_text()
    assert "### Table\n\n| a |" in text
    assert "a reason" in text
    assert "no-such-program is not here" in text
    assert "a reason" in (tmp_path / "output" / "log.txt").read_text()
    assert sorted(file.name for file in (tmp_path / "output").iterdir()) == ["gpu.json", "gpu.md", "log.txt"]


def test_the_next_call_skips_what_is_finished_until_it_is_asked_for(tmp_path: Path) -> None:
    counts = runs("counts", f"open({str(tmp_path / 'count')!r}, 'a').write('x')")
    fails = runs("fails", "raise SystemExit(1)")
    for again, expected in (((), "x"), ((), "x"), (("counts",), "xx"), (("failed",), "xx")):
        call(tmp_path, counts, fails, again=again)
        assert (tmp_path / "count").read_text() == expected
    assert len(json.loads((tmp_path / "output" / "gpu.json").read_text())["calls"]) == 4


def test_what_lacked_something_runs_when_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = writes("item", needs=("sometimes-here",))
    call(tmp_path, item)
    assert statuses(tmp_path) == {"item": "left out"}
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    call(tmp_path, item)
    assert statuses(tmp_path) == {"item": "done"}


def test_an_item_over_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (f"import subprocess, sys, time; p = subprocess.Popen(['sleep', '100'], start_new_session=True);"
            f"open({str(pid)!r}, 'w').write(str(p.pid)); print('so far', flush=True); time.sleep(100)")  # fmt: skip
    call(tmp_path, runs("long", code, minutes=1 / 60), writes("next"))
    assert statuses(tmp_path) == {"long": "over its time", "next": "done"}
    assert "so far" in (tmp_path / "output" / "gpu.md").read_text()
    assert not is_alive(int(pid.read_text()))


def is_alive(pid: int) -> bool:
    try:
        return b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False


def test_an_item_that_the_calls_end_cuts_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.1)
    waits = runs("waits", f"import os, time; time.sleep(0 if os.path.exists({str(tmp_path / 'go')!r}) else 100)")
    begun = call(tmp_path, waits, seconds=0)
    assert statuses(tmp_path) == {"waits": "waiting"}
    begun.seconds, begun.deadline = 60, time.monotonic() + 0.5
    assert not begun.run()
    assert statuses(tmp_path) == {"waits": "cut"}
    (tmp_path / "go").touch()
    call(tmp_path, waits)
    assert statuses(tmp_path) == {"waits": "done"}


def test_an_item_that_takes_more_than_a_whole_call_is_over_its_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.5)
    call(tmp_path, runs("long", "import time; time.sleep(100)", minutes=9), seconds=0.9)
    assert statuses(tmp_path) == {"long": "over its time"}


DRIVER = """
import sys
from pathlib import Path
from anlit.benchmarks.gpu import benchmark
from tests.benchmarks.test_gpu import writes
benchmark.ITEMS = tuple(writes(f"item-{number}", 0.5) for number in range(5))
sys.exit(benchmark.main(["--rehearse", "--state", sys.argv[1] + "/state", "--output", sys.argv[1] + "/output"]))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def kill_after(folder: Path, lines: int) -> None:
    """SIGKILL a call after it has said so many things: that an item begins, and how it ended."""
    process = start(folder)
    assert process.stdout is not None
    for _ in range(lines):
        assert "item-" in process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_at_ten_moments_it_ends_with_the_same_items(tmp_path: Path) -> None:
    """Inside each of the items and right after each."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir()
    assert start(undisturbed).wait() == 0
    for _ in range(5):
        kill_after(killed, 1)
        kill_after(killed, 2)
    process = start(killed)
    assert process.wait() == 0
    results, expected = written(killed), written(undisturbed)
    for name, result in results.items():
        assert {key: result[key] for key in ("status", "record", "tables")} == {
            key: expected[name][key] for key in ("status", "record", "tables")
        }
    assert statuses(killed) == {f"item-{number}": "done" for number in range(5)}
    # Inside it, and perhaps as it began, when the kill right after the one before came late.
    assert all(result["killed"] in (1, 2) for result in results.values())
    assert sorted(os.listdir(killed / "output")) == sorted(os.listdir(undisturbed / "output"))


def test_a_killed_call_leaves_no_process_for_the_next_and_is_counted(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    (tmp_path / "state").mkdir()
    left = subprocess.Popen(["sleep", "100"], env={**os.environ, MARK: str((tmp_path / "state").resolve())})
    while b"sleep" not in Path(f"/proc/{left.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    hangs = runs("hangs", code)
    for attempt in range(ATTEMPTS):
        running = {"status": "running", "what": hangs.what, "killed": attempt}
        (tmp_path / "state" / "results.json").write_text(json.dumps({"items": {"hangs": running}}))
        begun = Runner((hangs,), tmp_path / "state", tmp_path, 60, "the command")
        assert begun._killed(hangs) == attempt + 1
    assert left.wait(10) == -signal.SIGKILL
    assert begun.run()
    assert begun.results["hangs"]["status"] == "given up"
    assert not (tmp_path / "pid").exists()


def test_wrong_uses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ["--state", str(tmp_path / "state"), "--output", str(tmp_path / "output")]
    monkeypatch.setattr(benchmark, "is_gpu_here", lambda: False)
    for options, sentence in (
        ([*folders, "--minutes", "1"], "--minutes 1 is too short"),
        (folders, "add --rehearse to try it on a CPU"),
        (["--rehearse", "--state", str(tmp_path), "--output", str(tmp_path)], "needs a folder of its own"),
    ):
        with pytest.raises(UserError, match=sentence):
            main(["gpu", *options])
    call(tmp_path, writes("item"), rehearse=True)
    with pytest.raises(UserError, match="is of a rehearsal: give another folder"):
        call(tmp_path, writes("item"))


def test_the_list() -> None:
    names = [item.name for item in ITEMS]
    assert len(set(names)) == len(names)
    for item in ITEMS:
        assert item.minutes < 9, f"{item.name} does not fit into a call of nine minutes"
        assert set(item.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.slow
def test_the_real_list_at_toy_sizes(tmp_path: Path) -> None:
    """Calls it until it is done, as a user would, in a process that has no GPU."""
    options = ["--rehearse", "--state", str(tmp_path / "state"), "--output", str(tmp_path / "output")]
    command = [sys.executable, "-m", "anlit", "benchmark", "gpu", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    for _ in range(5):
        code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        if code == 0:
            break
        assert code == benchmark.CALL_AGAIN
    text = (tmp_path / "output" / "log.txt").read_text()
    assert set(statuses(tmp_path).values()) <= {"done", "left out"}, text
    assert set(statuses(tmp_path).values()) <= set(FINAL)
    for name, result in written(tmp_path).items():
        if result["status"] == "done" and not any("pytest" in part for part in result["arguments"]):
            assert "\n| " in result["tables"], f"{name} wrote no table"
    assert "| Qwen3" in written(tmp_path)["step-peers"]["tables"]

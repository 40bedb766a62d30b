"""`make gpu`: toy lists whose items fail, take too long and are killed; the real list on a machine without a GPU."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = (ROOT / "docker" / "gpu-items.mk").read_text().replace("\\\n", "")
HAS_GPU = Path("/dev/nvidiactl").exists()
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("make", "flock", "timeout"))), reason="Linux tools"
)


def start(folder: Path, *settings: str) -> subprocess.Popen[str]:
    """A call in a process group of its own."""
    places = (f"{name}={folder / name.lower()}" for name in ("STATE", "OUTPUT", "LIST", "WHEELS"))
    words = ["make", "-f", "docker/gpu.mk", *places, f"GPU_PYTHON={sys.executable}", *settings]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def call(folder: Path, *settings: str) -> tuple[int, str]:
    """The exit code and the output of a call."""
    process = start(folder, *settings)
    said = "".join(process.communicate())
    return process.returncode, said


def list_items(folder: Path, **recipes: str) -> None:
    """The list of items: minutes, what they find out (x) and their command."""
    lines = [f"{name}: ; $(RUN) {recipe}" for name, recipe in recipes.items()]
    (folder / "list").write_text("\n".join([f"ITEMS := {' '.join(recipes)}", *lines, ""]))


def statuses(folder: Path) -> dict[str, str]:
    results = map(json.loads, (folder / "output" / "gpu.jsonl").read_text().splitlines())
    return {result["item"]: result["status"] for result in results}


def test_results_are_written_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    writes = tmp_path / "writes"
    writes.write_text(
        "echo '{\n\"loss\": 7}' > $3/a.json\nprintf '# title\\n\\n## Table\\n\\n| a |\\n' > $3/a.md\n"
    )
    list_items(tmp_path, fails="1 'what fails' sh -c 'echo a reason; exit 3'", device="1 'x' needs=device true",
               unable="1 'x' needs=no-such-program true", last=f"1 'what it is' sh {writes} benchmark")  # fmt: skip
    code, said = call(tmp_path)
    assert code == 0, said
    assert statuses(tmp_path) == {
        "fails": "failed (3)", "device": "measured" if HAS_GPU else "no device",
        "unable": "left out: no-such-program is not here", "last": "measured",
    }  # fmt: skip
    assert '"record": {"loss": 7}' in (tmp_path / "output" / "gpu.jsonl").read_text()
    text = (tmp_path / "output" / "gpu.md").read_text()
    for part in (
        "## last: what it is",
        "### Table\n\n| a |",
        "a reason",
        "| unable | left out: no-such-program",
    ):
        assert part in text
    assert "# title" not in text


def test_the_next_call_skips_what_is_finished_until_it_is_asked_for(tmp_path: Path) -> None:
    list_items(tmp_path, counts=f"1 'x' sh -c 'printf x >> {tmp_path}/count'", fails="1 'x' false")
    for again, expected in (
        ((), "x"),
        ((), "x"),
        (("AGAIN=counts",), "xx"),
        (("AGAIN=failed",), "xx"),
    ):
        call(tmp_path, *again)
        assert (tmp_path / "count").read_text() == expected
    assert set(statuses(tmp_path)) == {"counts", "fails"}


def test_an_item_over_its_time_ends_with_all_its_processes(tmp_path: Path) -> None:
    long = f"0.02 'x' sh -c 'sleep 100 & echo $$! > {tmp_path}/pid; echo so far; wait'"
    list_items(tmp_path, long=long, next="1 'x' true")
    call(tmp_path)
    assert statuses(tmp_path) == {"long": "over its time", "next": "measured"}
    assert "so far" in (tmp_path / "output" / "gpu.md").read_text()
    process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status")
    assert not process.exists() or "State:\tZ" in process.read_text()


def test_an_item_that_the_calls_end_cuts_is_run_again(tmp_path: Path) -> None:
    waits = f"1 'x' sh -c 'test -e {tmp_path}/go || sleep 100'"
    list_items(tmp_path, short="1 'x' sleep 2", waits=waits, rest="1 'x' true")
    code, said = call(tmp_path, "TIME=6", "LEAST=1", "TOGETHER=1")
    assert code != 0
    assert "Call make gpu again for: waits rest." in said
    assert statuses(tmp_path) == {"short": "measured", "waits": "cut by the end of the call"}
    (tmp_path / "go").touch()
    assert call(tmp_path)[0] == 0
    assert set(statuses(tmp_path).values()) == {"measured"}


def test_what_killed_calls_left_is_waited_for_and_given_up_after_the_third(tmp_path: Path) -> None:
    """The item goes on when its call is killed, and is begun again by the next one."""
    busy, go = tmp_path / "busy", tmp_path / "go"
    until = f"mkdir {busy} && until [ -e {go} ]; do sleep 0.1; done; rmdir {busy}"
    list_items(
        tmp_path,
        first="1 'x' true",
        busy=f"1 'x' sh -c '{until}' > /dev/null 2>&1",
        last="1 'x' true",
    )
    for others in (2, 1, 0):
        process = start(tmp_path, "TOGETHER=1")
        while not busy.exists():
            assert process.poll() is None, "the call ended before its item began"
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        while others and busy.exists():
            go.touch()
            time.sleep(0.01)
        go.unlink(missing_ok=True)
    process = start(tmp_path)
    assert "still runs: waiting for its end" in process.stdout.readline()
    go.touch()
    process.communicate()
    assert process.returncode == 0
    assert statuses(tmp_path) == {"first": "measured", "busy": "given up", "last": "measured"}


def test_the_pth_file_of_a_wheel_is_read(tmp_path: Path) -> None:
    """nvidia-cutlass-dsl has one, without which `import cutlass` fails. Beneath are the packages of GPU_PYTHON."""
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "outer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("outer.pth", "outer/inside\n")
        wheel.writestr("outer/inside/inner_of_the_wheel.py", "")
        wheel.writestr(
            "outer-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: outer\nVersion: 1\n"
        )
        wheel.writestr(
            "outer-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("outer-1.dist-info/RECORD", "")
    list_items(tmp_path, imports="1 'x' $(PY) -c 'import inner_of_the_wheel, torch, anlit'")
    _, said = call(tmp_path)
    assert statuses(tmp_path) == {"imports": "measured"}, (
        said + (tmp_path / "output" / "gpu.md").read_text()
    )


RECIPES = dict(re.findall(r"^([\w-]+):\n\t\$\(RUN\) (.+)$", LIST, re.MULTILINE))


def test_every_item_has_a_recipe_that_fits_into_a_call() -> None:
    (items,) = re.findall(r"^ITEMS := (.+)$", LIST, re.MULTILINE)
    assert items.split() == list(RECIPES)
    assert all(float(recipe.split()[0]) < 9 for recipe in RECIPES.values()), (
        "a call has nine minutes"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, recipe in RECIPES.items() if "KERNELS" in recipe or "TESTS" in recipe]
)
def test_an_item_of_tests_selects_some(name: str) -> None:
    words = shlex.split(RECIPES[name].replace("$(KERNELS)", "tests/attention/test_gpu.py"))
    tests = itertools.dropwhile(lambda word: not word.startswith("tests/"), words)
    pytest_ = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu"]
    subprocess.run([*pytest_, *tests], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_device_the_whole_list_is_measured_or_says_so(tmp_path: Path) -> None:
    """As a user calls it in a clone."""
    folders = [
        f"STATE={tmp_path}/state",
        f"OUTPUT={tmp_path}/output",
        f"GPU_PYTHON={sys.executable}",
    ]
    subprocess.run(["make", "gpu", *folders], cwd=ROOT, check=True)
    text = (tmp_path / "output" / "gpu.md").read_text()
    assert list(statuses(tmp_path)) == list(RECIPES)
    for result in map(json.loads, (tmp_path / "output" / "gpu.jsonl").read_text().splitlines()):
        name, status = result["item"], result["status"]
        assert status.partition(":")[0] in {"measured", "no device", "left out"}
        if status == "measured" and name != "device":
            assert result["record"]["finished"], name
            assert "\n| " in text.partition(f"## {name}:")[2].partition("\n## ")[0], (
                f"{name} wrote no table"
            )

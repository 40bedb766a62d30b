"""Runs are started, skipped, continued and recorded, whatever kills the study meanwhile."""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.commands import study as command
from anlit.compare.comparison import record_runs
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.runs.folders import Curve, Run
from anlit.study import slurm
from anlit.study.launch import try_lock
from anlit.study.plan import Study
from anlit.study.record import read_record, restore
from anlit.study.results import read_tunings, select_points
from anlit.study.slurm import submit
from anlit.study.state import note_end, note_start, read_state
from tests.data.processes import wait_for
from tests.study.conftest import (
    ARMS,
    UNTUNED_ARMS,
    Launch,
    Process,
    arms_with,
    attributes,
    best_points,
    changed_study,
    shared_with,
    write_study,
)

RATE = "model.init_args.lr"


def starts(output: Path) -> dict[str, list[int]]:
    """For each run the steps that its starts began at."""
    steps_by_run = {}
    for path in output.glob("*/starts"):
        steps = path.read_text().split()
        steps_by_run[path.parent.name] = list(map(int, steps))
    return steps_by_run


def is_half_trained(output: Path) -> bool:
    """Whether a run has a checkpoint before its end, however busy the machine is."""
    steps = {path.read_text() for path in output.glob("*/checkpoint")}
    return bool(steps - {"", "10"})


def wait_until_half_trained(process: Process, output: Path) -> None:
    while process.wait(0.01) is None and not is_half_trained(output):
        pass


def finish(process: Process, code: int = 0) -> str:
    """What the study printed, after it has ended with the exit code."""
    actual_code = process.wait()
    printed = process.log.read_text()
    assert actual_code == code, printed
    return printed


def report_lines(output: Path) -> list[str]:
    """The lines of the report, but for the line that names the command."""
    lines = (output / "report.md").read_text().splitlines()
    return [line for line in lines if "made by" not in line]


def started_runs(printed: str) -> set[str]:
    """The names of the runs that a study says it started."""
    names = set()
    for line in printed.splitlines():
        name, _, event = line.partition(": ")
        if event == "started":
            names.add(name)
    return names


@pytest.mark.parametrize(
    ("visible", "devices", "gpus"),
    [
        ("2,5", 1, {"2", "5"}),
        ("2,5", "auto", {"2,5"}),
        ("2,-1", 1, {"2"}),  # CUDA reads no further
        ("-1", 1, {"-1"}),
        ("GPU-5a,MIG-7b", 1, {"GPU-5a", "MIG-7b"}),
    ],
)
def test_runs_of_one_gpu_take_the_gpus_in_turn(
    start: Launch, folder: Path, monkeypatch, visible: str, devices: Any, gpus: set[str]
) -> None:
    """A run with `devices: 1` takes the first GPU that it sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    write_study(folder, shared=shared_with({"trainer.devices": devices}))

    finish(start("--jobs", "2"))

    assert {path.read_text() for path in (folder / "out").glob("*/gpus")} == gpus


@pytest.mark.parametrize(("devices", "threads"), [(1, "6"), (4, "1"), ([0, 1], "3"), (8, "1")])
def test_the_ranks_of_a_run_share_its_threads(
    start: Launch, folder: Path, devices: Any, threads: str
) -> None:
    write_study(folder, shared=shared_with({"trainer.devices": devices}))

    finish(start("--threads", "6"))

    assert {path.read_text() for path in (folder / "out").glob("*/threads")} == {threads}


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_killed_at_random_goes_on_and_has_the_same_report(
    start: Launch, folder: Path, study: Study, kind: signal.Signals
) -> None:
    """SIGKILL hits the study alone, the group, or its children; it is started again each time."""
    output = folder / "out"
    assert "tuning: 6 runs" in finish(start("--jobs", "2"))
    undisturbed = report_lines(output)
    best = best_points(study, output)
    assert best["gpt"].shown == {"lr": 0.2}
    assert best["angpt"].shown == {"lr": 0.2}
    assert "started" not in finish(start()), "nothing is trained again"
    for steps in starts(output).values():
        assert len(steps) == 1
    output.rename(folder / "before")

    chance = random.Random(5)
    for attempt in range(5):
        process = start("--jobs", "2", step=0.03)
        wait_until_half_trained(process, output)
        seconds = chance.uniform(0, 0.5) if attempt else 0
        if process.wait(seconds) is None:
            is_whole_group = kind == signal.SIGKILL and attempt % 2 == 0
            process.kill(kind, group=is_whole_group)
            process.wait()
    finish(start("--jobs", "2"))

    assert not list(output.glob("*/mishaps"))
    all_steps = list(starts(output).values())
    for steps in all_steps:
        assert steps == sorted(steps), "a run lost what it had trained"
    assert max(map(len, all_steps)) > 1, "no run was cut"
    assert report_lines(output) == undisturbed


@pytest.mark.parametrize(
    "kind",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_group_leaves_no_failed_run(
    start: Launch, folder: Path, study: Study, kind: signal.Signals
) -> None:
    """A run that is still starting dies of the signal, perhaps before the study has it."""
    process = start("--jobs", "2", step=0.03)
    wait_until_half_trained(process, folder / "out")

    process.kill(kind, group=True)

    assert "interrupted: the same command goes on where this one ended" in finish(process, 75)
    assert "FAILED" not in finish(start("--jobs", "2"))


def test_runs_of_another_study_are_taken_over_where_all_settings_agree(
    start: Launch, folder: Path
) -> None:
    write_study(folder)
    finish(start("--jobs", "2"))
    output = folder / "out"
    first = output.rename(folder / "first")
    wider = {"configs": ["gpt.yaml"], "tune": {RATE: [0.1, 0.2, 0.8]}}
    study = changed_study(folder, arms=ARMS | {"gpt": wider}, title="Another")
    plan = finish(start("--dry_run", "--reuse", "first"))
    assert "(of 6: 3 taken by --reuse)" in plan, "the tuning of one arm is complete"

    printed = finish(start("--jobs", "2", "--reuse", "first"))

    names = attributes(study.tuning_runs(), "name")
    new_names = {name for name in names if "lr=0.8" in name}
    assert started_runs(printed) == new_names
    assert printed.count("taken from first") == 5 + 6
    measured = study.measuring_runs(best_points(study, output))
    for run in measured:
        record = output / run.name / "run.json"
        assert record.samefile(first / run.name / "run.json")

    output.rename(folder / "second")
    before_reuse = finish(start("--dry_run", "--reuse", "second"))
    assert "tuning: 0 runs, 0 tokens (of 6: 6 taken by --reuse)" in before_reuse
    assert "measuring: 0 runs, 0 tokens (of 6: 6 taken by --reuse)" in before_reuse
    assert not output.exists()
    (folder / "second").rename(output)
    shutil.rmtree(output / measured[-1].name)
    plan = finish(start("--dry_run", "--reuse", "first"))
    assert "0 tokens (of 6: 5 finished, 1 taken by --reuse)" in plan
    assert "--reuse nowhere is not a folder" in finish(start("--reuse", "nowhere"), code=1)


def test_a_study_goes_on_from_its_record(start: Launch, folder: Path, study: Study) -> None:
    """Runs in report.json are not trained. A study without an interruption has the same report."""
    output = folder / "out"
    finish(start("--jobs", "2"))
    lines = report_lines(output)
    shutil.rmtree(output)
    write_study(folder, arms=arms_with(tune={RATE: [0.1, 0.2]}), seeds=[1, 2])
    finish(start("--jobs", "2"))
    (folder / "record").mkdir()
    (output / "report.json").rename(folder / "record" / "report.json")
    shutil.rmtree(output)
    write_study(folder)

    collected = finish(start("--report_only", "--reuse", "record"), code=1)
    continued = finish(start("--jobs", "2", "--reuse", "record"))

    from_record = ": taken from record/report.json"
    assert collected.count("started") == 0
    assert collected.count(from_record) == 4
    assert continued.count("started") == 2 + 2
    assert continued.count(from_record) == 4
    assert report_lines(output) == lines
    for path in output.glob("*seed=1*/run.json"):
        record = json.loads(path.read_text())
        assert record["restored_from"] == "record/report.json"
        other = {"data": {"content_sha256": "c1"}, "begun_from": "0123456789ab"}
        write_json(path, record | other)
    finish(start("--report_only"))
    note = "anGPT: its runs were trained on DIFFERENT DATA, content c0 and c1."
    report = "\n".join(report_lines(output))
    assert note in report
    assert "anGPT: its runs began from the weights of DIFFERENT CONFIGURATIONS." in report


def restorable(name: str, **model: Any) -> Run:
    settings = {"model": {"d_model": 64, **model}, "trainer": {"max_steps": 1}}
    one_point = np.ones(1)
    curve = Curve(tokens=one_point, seconds=one_point, loss=one_point)
    return Run(Path(name), settings, {}, curve, None)


def test_a_recorded_run_has_all_its_settings_those_that_are_null_too(folder: Path) -> None:
    null = restorable("gone", alpha_init=None)
    number = restorable("other", alpha_init=0.1)
    record = record_runs([], [null, number])
    write_json(folder / "report.json", {"comparisons": [], **record})

    _, recorded = read_record(folder)

    assert recorded["gone"].config == null.config
    assert recorded["other"].config == number.config


@pytest.mark.parametrize("name", ["record", "../record"])
def test_a_restored_run_names_its_record_from_the_working_directory(
    folder: Path, name: str
) -> None:
    restored = folder / "restored"

    restore(restorable("gone"), restored, folder / name / "report.json")

    record = json.loads((restored / "run.json").read_text())
    assert record["restored_from"] == f"{name}/report.json"


def test_a_failing_run_is_recorded_and_does_not_stop_the_rest(folder: Path, start: Launch) -> None:
    bad = {
        "configs": ["gpt.yaml"],
        "settings": {"model.init_args.fail": True},
        "tune": {RATE: [1, 2, 3]},
    }
    study = changed_study(folder, arms=ARMS | {"bad": bad})

    printed = finish(start(), code=1)

    assert printed.count("FAILED error: it was to fail") == 3
    assert re.search(r"^bad +every setting failed +0 +– +–", printed, re.MULTILINE)
    *_, how_many, what_to_do = printed.splitlines()
    assert how_many == "15 runs: 12 finished, 3 failed"
    assert what_to_do == "failed: the report says why; --retry_failed tries these runs again"
    tunings = read_tunings(study, folder / "out")
    selected = select_points(study, tunings)
    assert selected.keys() == {"gpt", "angpt"}
    _, _, bad_tuning = tunings
    for tuned in bad_tuning.points:
        (state,) = tuned.states
        assert state.reason == "error: it was to fail"
    assert "error: it was to fail" in "\n".join(report_lines(folder / "out"))
    assert "started" not in finish(start(), code=1)
    assert finish(start("--retry_failed"), code=1).count("FAILED") == 3


def test_a_report_on_present_runs_ends_with_what_is_missing(folder: Path, start: Launch) -> None:
    changed_study(folder, arms=UNTUNED_ARMS)
    assert " finished" not in finish(start()).splitlines()[-1], "nothing is missing"
    for run in (folder / "out").glob("angpt*seed=[23]-*"):
        shutil.rmtree(run)

    *_, how_many, what_to_do = finish(start("--report_only"), code=1).splitlines()

    assert how_many == "6 runs: 4 finished, 2 pending"
    assert what_to_do == "the rest: anlit study without --report_only trains it"


def test_a_run_that_another_process_trains_is_waited_for(
    study: Study, start: Launch, folder: Path
) -> None:
    """Others train meanwhile; another study that would report into the folder is refused."""
    output = folder / "out"
    planned, *_ = study.tuning_runs()
    run = output / planned.name
    lock = try_lock(run)
    assert lock is not None
    assert try_lock(run) is None

    process = start("--jobs", "1")
    wait_for(lambda: len(starts(output)) == 5)
    assert not (run / "starts").exists()
    Path("study.yaml").rename("other.yaml")
    with pytest.raises(UserError, match="--output out has another report"):
        command.main(["--config", "other.yaml", "--output", "out"])
    fcntl.flock(lock, fcntl.LOCK_UN)  # the forked study inherited the file
    assert "another process trains it" in finish(process)


@pytest.mark.parametrize(
    ("code", "record", "status"),
    [
        (75, None, "interrupted"),
        (-9, None, "failed"),
        (2, None, "failed"),
        (None, "finished", "finished"),
        (None, "failed", "failed"),
        (None, "interrupted", "interrupted"),
        (None, "running", "interrupted"),
    ],
)
def test_what_a_folder_says_of_its_run(
    tmp_path: Path, code: int | None, record: str | None, status: str
) -> None:
    assert read_state(tmp_path).status == "pending"
    if code is not None:
        note_start(tmp_path, "local")
        assert read_state(tmp_path).status == "interrupted"
        note_end(tmp_path, code)
    if record is not None:
        content = {"status": record, "error": "NaN"}
        (tmp_path / "run.json").write_text(json.dumps(content))

    assert read_state(tmp_path).status == status


def test_a_run_that_ended_three_times_is_left(tmp_path: Path) -> None:
    for _ in range(3):
        note_start(tmp_path, "slurm 1")

    assert read_state(tmp_path).reason.startswith("ended 3 times")


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory. Its scripts `sbatch` and `squeue` stand for the cluster's."""
    train_script = Path(__file__).parents[2] / "docker" / "slurm" / "train.sbatch"
    monkeypatch.setattr(slurm, "TRAIN_SCRIPT", train_script)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def accept_jobs(cluster: Path) -> None:
    """Let sbatch write its arguments into the file `calls`."""
    write_script(cluster / "sbatch", 'printf "%s\\n" "$*" >> calls\necho "77;cluster"')


def mark_finished(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text('{"status": "finished"}')


def test_without_slurm_or_with_a_refusal_there_is_a_sentence(
    study: Study, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = study.tuning_runs()
    write_script(cluster / "sbatch", "echo 'no such partition' >&2\nexit 1")
    with pytest.raises(UserError, match="no such partition"):
        submit(runs, cluster / "refused", [], [], 0)

    (cluster / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(UserError, match="sbatch is not here"):
        submit(runs, cluster / "refused", [], [], 0)

    monkeypatch.setattr(slurm, "TRAIN_SCRIPT", cluster / "train.sbatch")
    with pytest.raises(UserError, match=r"train\.sbatch is not here: run anlit study --slurm in"):
        submit(runs, cluster / "refused", [], [], 0)


def test_slurm_gets_an_array_and_a_job_that_goes_on(study: Study, cluster: Path) -> None:
    accept_jobs(cluster)
    output = cluster / "out"
    runs = study.tuning_runs()
    mark_finished(output / runs[0].name)
    command_line = ["study", "--config", "s.yaml", "--slurm"]

    array = submit(runs, output, command_line, ["--time=1:00"], max_tasks=4)

    assert array == "77"
    first, second = (cluster / "calls").read_text().splitlines()
    options = first.split()
    assert "--array=0-4%4" in options
    assert "--signal=SIGUSR1@90" in options
    assert first.index("--time=24:00:00") < first.index("--time=1:00")
    assert "--dependency=afterany:77" in second
    assert "-m anlit study --config s.yaml --slurm" in second
    assert read_state(output / runs[1].name).status == "interrupted"
    write_script(cluster / "squeue", 'echo "77_1 anlit R"')
    with pytest.raises(UserError, match="job array 77 still has runs"):
        submit(runs, output, [], [], 0)


def test_a_task_of_the_array_has_the_options_of_its_run(study: Study, cluster: Path) -> None:
    accept_jobs(cluster)
    output = cluster / "out"
    runs = study.tuning_runs()
    submit(runs, output, [], [], 0)
    (cluster / "train.sbatch").write_text('printf "%s\\n" "$@" > options')
    script = (output / "slurm" / "array-0.sbatch").read_text()
    script = script.replace(str(slurm.TRAIN_SCRIPT), "train.sbatch")

    environment = os.environ | {"SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", "-c", script], env=environment, check=True)

    options = (cluster / "options").read_text().splitlines()
    assert options == runs[1].options(output / runs[1].name)


def test_a_phase_that_has_ended_submits_nothing(study: Study, cluster: Path) -> None:
    runs = study.tuning_runs()
    for run in runs:
        mark_finished(cluster / "out" / run.name)

    assert submit(runs, cluster / "out", [], [], 0) is None

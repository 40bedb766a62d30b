"""Runs are started, skipped, continued and recorded, whatever kills the study meanwhile."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

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
from anlit.study.read_study import read_study
from anlit.study.record import read_record, restore
from anlit.study.results import read_tunings, select_points
from anlit.study.slurm import submit
from anlit.study.state import note_end, note_start, read_state
from tests.study.conftest import STUDY, Launch, Process, write_study

RATE = "model.init_args.lr"


def starts(output: Path) -> dict[str, list[int]]:
    """For each run the steps that its starts began at."""
    return {
        path.parent.name: [int(line) for line in path.read_text().split()]
        for path in output.glob("*/starts")
    }


def is_half_trained(output: Path) -> bool:
    """Whether a run has a checkpoint before its end, however busy the machine is."""
    return any(path.read_text() not in ("", "10") for path in output.glob("*/checkpoint"))


def finish(process: Process, code: int = 0) -> str:
    """What the study printed, after it has ended with the exit code."""
    assert process.wait() == code, process.log.read_text()
    return process.log.read_text()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_killed_at_random_goes_on_and_has_the_same_report(
    start: Launch, folder: Path, study: Study, kind: signal.Signals
) -> None:
    """SIGKILL hits the study alone, the group, or its children; it is started again each time."""
    assert "tuning: 6 runs" in finish(start("--jobs", "2"))
    undisturbed = (folder / "out" / "report.md").read_text()
    best = {
        name: point.shown
        for name, point in select_points(study, read_tunings(study, folder / "out")).items()
    }
    assert best == {"gpt": {"lr": 0.2}, "angpt": {"lr": 0.2}}
    assert "started" not in finish(start()), "nothing is trained again"
    assert set(map(len, starts(folder / "out").values())) == {1}
    os.rename(folder / "out", folder / "before")
    chance = random.Random(5)
    for attempt in range(5):
        process = start("--jobs", "2", step=0.03)
        while process.wait(0.01) is None and not is_half_trained(folder / "out"):
            pass
        if process.wait(chance.uniform(0, 0.5) if attempt else 0) is None:
            process.kill(kind, group=kind == signal.SIGKILL and attempt % 2 == 0)
            process.wait()
    finish(start("--jobs", "2"))
    assert not list((folder / "out").glob("*/mishaps"))
    start_steps = starts(folder / "out")
    assert all(steps == sorted(steps) for steps in start_steps.values()), (
        f"a run lost what it had trained: {start_steps}"
    )
    assert any(len(steps) > 1 for steps in start_steps.values()), "no run was cut"
    assert (folder / "out" / "report.md").read_text() == undisturbed


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_group_leaves_no_failed_run(
    start: Launch, folder: Path, study: Study, kind: signal.Signals
) -> None:
    """A run that is still starting dies of the signal, perhaps before the study has it."""
    process = start("--jobs", "2", step=0.03)
    while process.wait(0.01) is None and not is_half_trained(folder / "out"):
        pass
    process.kill(kind, group=True)
    assert "interrupted: the same command goes on where this one ended" in finish(process, 75)
    assert "FAILED" not in finish(start("--jobs", "2"))


def test_runs_of_another_study_are_taken_over_where_all_settings_agree(
    start: Launch, folder: Path
) -> None:
    write_study(folder)
    finish(start("--jobs", "2"))
    os.rename(folder / "out", folder / "first")
    wider = {"configs": ["gpt.yaml"], "tune": {RATE: [0.1, 0.2, 0.8]}}
    study = read_study(
        write_study(folder, arms=STUDY["arms"] | {"gpt": wider}, title="Another"), None
    )
    out = finish(start("--jobs", "2", "--reuse", "first"))
    trained = {line.split(":")[0] for line in out.splitlines() if "started" in line}
    assert trained == {run.name for run in study.tuning_runs() if "lr=0.8" in run.name}
    assert out.count("taken from first") == 5 + 6
    for run in study.measuring_runs(select_points(study, read_tunings(study, folder / "out"))):
        assert (folder / "out" / run.name / "run.json").samefile(
            folder / "first" / run.name / "run.json"
        )
    shutil.rmtree(folder / "out" / run.name)
    assert "0 tokens (of 6: 5 finished, 1 taken by --reuse)" in finish(
        start("--dry_run", "--reuse", "first")
    )
    assert "--reuse nowhere is no folder" in finish(start("--reuse", "nowhere"), code=1)


def test_a_study_goes_on_from_its_record(start: Launch, folder: Path, study: Study) -> None:
    """Of both phases only the runs that are not in report.json are trained, and the report is that of a study in one
    go, but for the line that names the command.
    """
    finish(start("--jobs", "2"))
    lines = [
        line
        for line in (folder / "out" / "report.md").read_text().splitlines()
        if "made by" not in line
    ]
    shutil.rmtree(folder / "out")
    arms = {name: arm | {"tune": {RATE: [0.1, 0.2]}} for name, arm in STUDY["arms"].items()}
    write_study(folder, arms=arms, seeds=[1, 2])
    finish(start("--jobs", "2"))
    (folder / "record").mkdir()
    (folder / "out" / "report.json").rename(folder / "record" / "report.json")
    shutil.rmtree(folder / "out")
    write_study(folder)
    out = finish(start("--report_only", "--reuse", "record"), code=1)
    assert (out.count("started"), out.count(": taken from record/report.json")) == (0, 4)
    out = finish(start("--jobs", "2", "--reuse", "record"))
    assert (out.count("started"), out.count(": taken from record/report.json")) == (2 + 2, 4)
    restarted_lines = [
        line
        for line in (folder / "out" / "report.md").read_text().splitlines()
        if "made by" not in line
    ]
    assert restarted_lines == lines
    for restored in folder.glob("out/*seed=1*/run.json"):
        assert json.loads(restored.read_text())["restored_from"] == "record/report.json"
        write_json(restored, json.loads(restored.read_text()) | {"data": {"content_sha256": "c1"}})
    finish(start("--report_only"))
    text = (folder / "out" / "report.md").read_text()
    assert "anGPT: its runs were trained on DIFFERENT DATA, content c0 and c1." in text


def test_a_restored_run_names_its_record_from_the_working_directory(folder: Path) -> None:
    """And has all its settings, those that are null too."""
    settings = {"model": {"alpha_init": None, "d_model": 64}, "trainer": {"max_steps": 1}}
    runs = [
        Run(Path(name), settings, {}, Curve(*np.ones((3, 1))), None) for name in ("gone", "other")
    ]
    runs[1] = replace(runs[1], config=settings | {"model": {"alpha_init": 0.1, "d_model": 64}})
    write_json(folder / "report.json", {"comparisons": [], **record_runs([], runs)})
    assert [restored_run.config for restored_run in read_record(folder)[1].values()] == [
        recorded.config for recorded in runs
    ]
    run = runs[0]
    for name in ("record", "../record"):
        restore(run, folder / "restored", folder / name / "report.json")
        assert (
            json.loads((folder / "restored" / "run.json").read_text())["restored_from"]
            == f"{name}/report.json"
        )
        shutil.rmtree(folder / "restored")


def test_a_failing_run_is_recorded_and_does_not_stop_the_rest(folder: Path, start: Launch) -> None:
    bad = {
        "configs": ["gpt.yaml"],
        "settings": {"model.init_args.fail": True},
        "tune": {RATE: [1, 2, 3]},
    }
    study = read_study(write_study(folder, arms=STUDY["arms"] | {"bad": bad}), None)
    assert finish(start(), code=1).count("FAILED error: it was to fail") == 3
    assert set(select_points(study, read_tunings(study, folder / "out"))) == {"gpt", "angpt"}
    states = [
        state
        for tuning in read_tunings(study, folder / "out")
        for point in tuning.points
        for state in point.states
    ]
    assert [state.reason for state in states if state.status == "failed"] == 3 * [
        "error: it was to fail"
    ]
    assert "error: it was to fail" in (folder / "out" / "report.md").read_text()
    assert "started" not in finish(start(), code=1)
    assert finish(start("--retry_failed"), code=1).count("FAILED") == 3


def test_a_run_that_another_process_trains_is_waited_for(
    study: Study, start: Launch, folder: Path
) -> None:
    """And another study that would report into the same folder is refused meanwhile."""
    run = folder / "out" / study.tuning_runs()[0].name
    lock = try_lock(run)
    assert lock is not None
    assert try_lock(run) is None
    process, deadline = start(), time.monotonic() + 20
    while len(starts(folder / "out")) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (run / "starts").exists()
    os.rename("study.yaml", "other.yaml")
    with pytest.raises(UserError, match="--output out has another report"):
        command.main(["--config", "other.yaml", "--output", "out"])
    fcntl.flock(lock, fcntl.LOCK_UN)  # the forked study inherited the file
    assert "another process trains it" in finish(process)


@pytest.mark.parametrize(("code", "record", "status"), [
    (75, None, "interrupted"), (-9, None, "failed"), (2, None, "failed"), (None, "finished", "finished"),
    (None, "failed", "failed"), (None, "interrupted", "interrupted"), (None, "running", "interrupted"),
])  # fmt: skip
def test_what_a_folder_says_of_its_run(
    tmp_path: Path, code: int | None, record: str | None, status: str
) -> None:
    assert read_state(tmp_path).status == "pending"
    if code is not None:
        note_start(tmp_path, "local")
        assert read_state(tmp_path).status == "interrupted"
        note_end(tmp_path, code)
    if record is not None:
        (tmp_path / "run.json").write_text(f'{{"status": "{record}", "error": "NaN"}}')
    assert read_state(tmp_path).status == status


def test_a_run_that_ended_three_times_is_left(tmp_path: Path) -> None:
    for _ in range(3):
        note_start(tmp_path, "slurm 1")
    assert read_state(tmp_path).reason.startswith("ended 3 times")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def finished(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text('{"status": "finished"}')


def test_slurm_gets_an_array_and_a_job_that_goes_on(
    study: Study, folder: Path, monkeypatch
) -> None:
    calls, output, runs = folder / "calls", folder / "out", study.tuning_runs()
    monkeypatch.setattr(
        slurm, "TRAIN_SCRIPT", Path(__file__).parents[2] / "docker/slurm/train.sbatch"
    )
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UserError, match="sbatch is not here"):
        submit(runs, folder / "refused", [], [], 0)
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    script(folder / "sbatch", "echo 'no such partition' >&2\nexit 1")
    with pytest.raises(UserError, match="no such partition"):
        submit(runs, folder / "refused", [], [], 0)

    script(folder / "sbatch", f'printf "%s\\n" "$*" >> {calls}\necho "77;cluster"')
    finished(output / runs[0].name)
    assert (
        submit(
            runs, output, ["study", "--config", "s.yaml", "--slurm"], ["--time=1:00"], max_tasks=4
        )
        == "77"
    )
    first, second = calls.read_text().splitlines()
    assert {"--array=0-4%4", "--signal=SIGUSR1@90"} < set(first.split())
    assert first.index("--time=24:00:00") < first.index("--time=1:00")
    assert "--dependency=afterany:77" in second
    assert "-m anlit study --config s.yaml --slurm" in second
    assert read_state(output / runs[1].name).status == "interrupted"
    script(folder / "squeue", 'echo "77_1 anlit R"')
    with pytest.raises(UserError, match="job array 77 still has runs"):
        submit(runs, output, [], [], 0)

    (folder / "train.sbatch").write_text('printf "%s\\n" "$@" > options')
    array = (
        (output / "slurm" / "array-0.sbatch")
        .read_text()
        .replace(str(slurm.TRAIN_SCRIPT), "train.sbatch")
    )
    subprocess.run(["bash", "-c", array], env=os.environ | {"SLURM_ARRAY_TASK_ID": "1"}, check=True)
    assert (folder / "options").read_text().splitlines() == runs[2].options(output / runs[2].name)
    for run in runs:
        finished(output / run.name)
    assert submit(runs, output, [], [], 0) is None

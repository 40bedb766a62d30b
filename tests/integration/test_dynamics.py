"""Training dynamics from the command line to the study's section."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anlit.runs.folders import Run, load_run
from anlit.study.grid import GridPoint
from anlit.study.plan import Arm
from anlit.study.record import restore
from anlit.study.sections.dynamics import dynamics, mean_over_seeds, read_metrics
from tests.integration.conftest import Train
from tests.integration.run_files import column

SETTINGS = (
    "--config=trainer/dynamics.yaml",
    "--trainer.max_steps=20",
    "--trainer.log_every_n_steps=10",
    "--trainer.callbacks.every_n_steps=10",
)


def test_the_fragment_logs_what_the_section_reads(trained: Train) -> None:
    folder = trained(*SETTINGS)

    logged = read_metrics(load_run(folder))

    assert [*logged["rotation/W_q"]] == [10, 20]
    assert [*logged["norms/share_at_bound"]] == [10, 20]
    assert [*logged["val/loss"]] == [17, 20]
    first = np.array(column(folder, "copying/first"))
    second = np.array(column(folder, "copying/second"))
    assert [*logged["induction_gain"].values()] == pytest.approx(first - second)


@pytest.fixture
def restored(trained: Train, tmp_path: Path) -> Run:
    """A run of a report, with its curve of the validation loss alone."""
    run = load_run(trained(*SETTINGS))
    restore(run, tmp_path / "restored", tmp_path / "report.json")
    return load_run(tmp_path / "restored")


def test_a_restored_run_has_the_validation_loss_alone(trained: Train, restored: Run) -> None:
    logged = read_metrics(load_run(trained(*SETTINGS)))

    expected = pytest.approx(logged["val/loss"], rel=1e-5)
    assert read_metrics(restored) == {"val/loss": expected}


def results_of(folder: Path, *runs: Run) -> Any:
    """The results of a study with an arm of these runs."""
    arm = Arm("angpt", "angpt", "anGPT", (), GridPoint({}, {}), {}, ())
    study = SimpleNamespace(arms=[arm])
    return SimpleNamespace(study=study, output=folder, runs_of=lambda arm: runs)


def test_the_section_takes_finished_runs_that_logged_them(
    trained: Train, restored: Run, tmp_path: Path
) -> None:
    run = load_run(trained(*SETTINGS))
    unfinished = replace(run, record={**run.record, "status": "interrupted"})

    lines = dynamics(results_of(tmp_path, run, unfinished, restored), {})

    text = "\n".join(lines)
    logged = read_metrics(run)
    rotation = np.mean([*logged["rotation/W_q"].values()])
    last_norm = logged["hidden/last/norm"][20]
    assert f"| rotation of W_q's rows per step (radians) | {rotation:.4g} |" in text
    assert "| seeds that logged them | 1 of 2 |" in text
    assert f"| ‖h‖ after the last block | {last_norm:.4g} |" in text
    assert (tmp_path / "dynamics.png").stat().st_size > 10_000


def test_a_section_without_such_runs_names_the_fragment(
    trained: Train, restored: Run, tmp_path: Path
) -> None:
    run = load_run(trained(*SETTINGS))
    unfinished = replace(run, record={**run.record, "status": "interrupted"})

    _, without_runs, *_ = dynamics(results_of(tmp_path, unfinished, restored), {})
    _, of_another_arm, *_ = dynamics(results_of(tmp_path, run), {"arms": ["gpt"]})

    assert "trainer/dynamics.yaml" in without_runs
    assert "trainer/dynamics.yaml" in of_another_arm


def test_a_mean_over_seeds_has_the_steps_that_all_have() -> None:
    first = {"val/loss": {10.0: 4.0, 20.0: 3.0}}
    second = {"val/loss": {10.0: 5.0}}

    assert mean_over_seeds([first, second])["val/loss"] == {10.0: pytest.approx(4.5)}

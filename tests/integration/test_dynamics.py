"""Training dynamics from the command line to the study's section."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anlit.runs.folders import load_run
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

    assert list(logged["rotation/W_q"]) == [10, 20] == list(logged["norms/share_at_bound"])
    assert list(logged["val/loss"]) == [17, 20]
    first = np.array(column(folder, "copying/first"))
    second = np.array(column(folder, "copying/second"))
    assert list(logged["induction_gain"].values()) == pytest.approx(first - second)


def test_the_section_takes_finished_runs_that_logged_them(trained: Train, tmp_path: Path) -> None:
    run = load_run(trained(*SETTINGS))
    logged = read_metrics(run)
    unfinished = replace(run, record={**run.record, "status": "interrupted"})
    restore(run, tmp_path / "restored", tmp_path / "report.json")
    restored = load_run(tmp_path / "restored")
    assert read_metrics(restored) == {"val/loss": pytest.approx(logged["val/loss"], rel=1e-5)}
    arm = Arm("angpt", "angpt", "anGPT", (), GridPoint({}, {}), {}, ())
    results: Any = SimpleNamespace(study=SimpleNamespace(arms=[arm]), output=tmp_path)

    results.runs_of = lambda arm: (run, unfinished, restored)
    text = "\n".join(dynamics(results, {}))

    rotation = np.mean([*logged["rotation/W_q"].values()])
    assert f"| rotation of W_q's rows per step (radians) | {rotation:.4g} |" in text
    assert "| seeds that logged them | 1 of 2 |" in text
    assert f"| ‖h‖ after the last block | {logged['hidden/last/norm'][20]:.4g} |" in text
    assert (tmp_path / "dynamics.png").stat().st_size > 10_000
    assert "trainer/dynamics.yaml" in dynamics(results, {"arms": ["gpt"]})[1]
    results.runs_of = lambda arm: (unfinished, restored)
    assert "trainer/dynamics.yaml" in dynamics(results, {})[1]


def test_a_mean_over_seeds_has_the_steps_that_all_have() -> None:
    first = {"val/loss": {10.0: 4.0, 20.0: 3.0}}
    second = {"val/loss": {10.0: 5.0}}

    assert mean_over_seeds([first, second])["val/loss"] == {10.0: pytest.approx(4.5)}

"""Training dynamics from the command line to the study's section."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from anlit.runs.folders import load_run
from anlit.study.grid import GridPoint
from anlit.study.plan import Arm
from anlit.study.record import restore
from anlit.study.sections.dynamics import dynamics, mean_over_seeds, read_metrics
from tests.integration.conftest import Train


def test_the_fragment_fills_the_section_of_a_report(trained: Train, tmp_path: Path) -> None:
    folder = trained(
        "--config=trainer/dynamics.yaml",
        "--trainer.max_steps=100",
        "--trainer.log_every_n_steps=50",
    )
    run = load_run(folder)
    logged = read_metrics(run)
    assert list(logged["rotation/W_q"]) == [50, 100] == list(logged["norms/share_at_bound"])
    assert list(logged["val/loss"]) == [17, 34, 51, 68, 85, 100]
    rows = [row for row in csv.DictReader((folder / "metrics.csv").open()) if row["copying/first"]]
    gains = [float(row["copying/first"]) - float(row["copying/second"]) for row in rows]
    assert list(logged["induction_gain"].values()) == pytest.approx(gains)

    unfinished = replace(run, record={**run.record, "status": "interrupted"})
    restore(run, tmp_path / "restored", tmp_path / "report.json")
    restored = load_run(tmp_path / "restored")
    assert read_metrics(restored) == {"val/loss": pytest.approx(logged["val/loss"], rel=1e-5)}
    arm, results = (
        Arm("angpt", "angpt", "anGPT", (), GridPoint({}, {}), {}, ()),
        cast(Any, SimpleNamespace()),
    )
    results.study, results.output = SimpleNamespace(arms=[arm]), tmp_path
    results.runs_of = lambda arm: (run, unfinished, restored)
    text = "\n".join(dynamics(results, {}))
    assert (
        f"| rotation of W_q's rows per step (radians) | {np.mean([*logged['rotation/W_q'].values()]):.4g} |"
        in text
    )
    assert "| seeds that logged them | 1 of 2 |" in text
    assert f"| ‖h‖ after the last block | {logged['hidden/last/norm'][100]:.4g} |" in text
    assert (tmp_path / "dynamics.png").stat().st_size > 10_000
    assert "trainer/dynamics.yaml" in dynamics(results, {"arms": ["gpt"]})[1]
    results.runs_of = lambda arm: (unfinished, restored)
    assert "trainer/dynamics.yaml" in dynamics(results, {})[1]
    first, second = {"val/loss": {10.0: 4.0, 20.0: 3.0}}, {"val/loss": {10.0: 5.0}}
    assert mean_over_seeds([first, second])["val/loss"] == {10.0: pytest.approx(4.5)}, (
        "steps that all have"
    )

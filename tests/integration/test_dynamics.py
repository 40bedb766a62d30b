"""Training dynamics from the command line to the study's section."""

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anlit.analysis.study.dynamics import dynamics, mean_over_seeds, series
from anlit.cli import main
from anlit.runs.folders import load_run
from tests.integration.conftest import fit_arguments


def test_the_fragment_fills_the_section_of_a_report(shards: Path, tmp_path: Path) -> None:
    fragment = ["--config=trainer/dynamics.yaml", "--trainer.max_steps=100", "--trainer.log_every_n_steps=50"]
    assert main(fit_arguments(shards, tmp_path / "run", *fragment)) == 0
    run = load_run(tmp_path / "run")
    found = series(run)
    assert list(found["rotation/W_q"][0]) == [50, 100] == list(found["norms/share_at_bound"][0])
    assert list(found["val/loss"][0]) == [17, 34, 51, 68, 85, 100]
    assert found["hidden/last/norm"][1][-1] > 0
    rows = [row for row in csv.DictReader((tmp_path / "run/metrics.csv").open()) if row["copying/first"]]
    saved = [float(row["copying/first"]) - float(row["copying/second"]) for row in rows]
    assert found["induction_gain"][1] == pytest.approx(saved)

    unfinished = replace(run, record={**run.record, "status": "interrupted"})
    results: Any = SimpleNamespace(
        study=SimpleNamespace(arms=[SimpleNamespace(title="anGPT", base="angpt")]),
        measured=lambda arm: (run, unfinished),
        output=tmp_path,
    )
    text = "\n".join(dynamics(results, {}))
    mean = f"{sum(found['rotation/W_q'][1]) / 2:.4g}"
    assert f"| rotation of W_q's rows per step (radians) | {mean} |" in text
    last = f"{found['hidden/last/norm'][1][-1]:.4g}"
    assert f"| ‖h‖ after the last block | {last} |" in text
    assert (tmp_path / "dynamics.png").stat().st_size > 10_000
    assert dynamics(results, {"arms": ["angpt"]}) == dynamics(results, {})
    assert "trainer/dynamics.yaml" in dynamics(results, {"arms": ["gpt"]})[1]
    results.measured = lambda arm: (unfinished,)
    assert "trainer/dynamics.yaml" in dynamics(results, {})[1]


def test_the_mean_is_over_the_steps_that_all_seeds_have() -> None:
    one = {"val/loss": (np.array([10.0, 20.0]), np.array([4.0, 3.0]))}
    two = {"val/loss": (np.array([10.0]), np.array([5.0]))}
    steps, values = mean_over_seeds([one, two])["val/loss"]
    assert (list(steps), list(values)) == ([10], [pytest.approx(4.5)])

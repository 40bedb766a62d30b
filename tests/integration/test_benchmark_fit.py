"""`anlit benchmark fit`: a real run and its bare steps, in turns."""

import json
from pathlib import Path

import pytest

from anlit.cli import main
from tests.integration.conftest import fit_arguments


def benchmark(shards: Path, folder: Path, *options: str) -> int:
    _, *settings = fit_arguments(shards, folder / "unused")
    command = ["benchmark", "fit", "--output", str(folder), "--rounds", "1", "--steps", "40"]
    return main([*command, "--", *settings, *options])


def test_steps_of_a_run_stand_beside_bare_steps(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run takes one device, as the bare steps do, also where it would take two."""
    options = (
        "--trainer.precision=bf16-mixed",
        "--trainer.accumulate_grad_batches=2",
        "--trainer.devices=2",
    )

    assert benchmark(shards, tmp_path, *options) == 0

    (times,) = json.loads((tmp_path / "fit.json").read_text())["rounds"]
    assert times["ratio"] == times["fit"] / times["bare"]
    assert 0 <= times["data_wait_share"] < 1
    assert f"{times['ratio']:.3f}" in capsys.readouterr().out
    assert not (tmp_path / "unused").exists()
    (launch,) = json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    assert launch["hardware"]["devices"] == ["cpu"]


def test_a_run_that_is_refused_says_why(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark(shards, tmp_path, "--model.n_heads=3") == 2

    errors = capsys.readouterr().err
    assert errors.startswith("anlit: error: anlit fit --model=AnGPT")
    assert "d_model" in errors

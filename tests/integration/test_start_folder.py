"""Commands on a run from another folder than the one in which it was started."""

import shutil
from pathlib import Path

import pytest

from anlit.cli import main
from tests.integration.conftest import fit_arguments
from tests.integration.run_files import config_of

STEPS = ("--trainer.max_steps=2", "--trainer.val_check_interval=2")


@pytest.fixture
def run(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose paths are relative to where it was started; the test is elsewhere."""
    start = tmp_path / "start"
    shutil.copytree(shards, start / "data" / "mine")
    monkeypatch.chdir(start)
    assert main(fit_arguments(Path("data/mine"), Path("runs/gpt"), *STEPS)) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return start / "runs" / "gpt"


def test_a_run_is_evaluated_from_another_folder_on_its_own_data(run: Path, capsys) -> None:
    data = run.parents[1] / "data" / "mine"

    assert main(["validate", str(run)]) == 0

    assert f"data.path={data}, from the folder where {run} was started" in capsys.readouterr().out
    assert main(["lengths", str(run), "--output=lengths", "--lengths=16"]) == 0


def test_a_run_continues_from_another_folder_on_its_own_data(run: Path) -> None:
    options = ["--config", str(run / "config.yaml"), "--run_dir", str(run), "--ckpt_path=last"]

    assert main(["fit", *options, "--trainer.max_steps=4"]) == 0

    data = config_of(run)["data"]["init_args"]["path"]
    assert data == str(run.parents[1] / "data" / "mine")


def test_a_path_of_the_command_is_relative_to_where_it_is_given(run: Path, refusal) -> None:
    error = refusal("validate", run, "--data.path=data")

    assert "there is no data/manifest.json" in error


def test_a_new_run_reads_its_data_where_it_is_started(run: Path, refusal) -> None:
    error = refusal("fit", "--config", run / "config.yaml", "--run_dir=new")

    assert "there is no data/mine/manifest.json" in error


def test_a_run_that_was_moved_does_not_tell_where_it_was_started(run: Path, refusal) -> None:
    moved = run.rename(run.parents[2] / "moved")

    assert "there is no data/mine/manifest.json" in refusal("validate", moved)

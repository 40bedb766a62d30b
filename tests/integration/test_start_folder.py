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


def test_a_run_that_was_moved_says_so_and_which_data_it_misses(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder does not tell where it was started."""
    moved = run.rename(run.parents[2] / "moved")
    sentence = f"{moved} was moved or copied from runs/gpt, and data.path=data/mine of its"

    assert main(["validate", str(moved)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.out
    assert "there is no data/mine/manifest.json" in captured.err
    assert main(["lengths", str(moved), "--output=lengths"]) == 2
    assert sentence in capsys.readouterr().err
    data = run.parents[1] / "data" / "mine"
    assert main(["validate", str(moved), f"--data.path={data}"]) == 0
    assert "was moved" not in capsys.readouterr().out


def test_a_run_that_was_moved_does_not_continue_where_it_was(run: Path, refusal) -> None:
    moved = run.rename(run.parents[2] / "moved")
    continued = ("fit", "--config", moved / "config.yaml", "--ckpt_path=last")

    error = refusal(*continued)

    assert f"{moved} was moved or copied, because its config.yaml has run_dir=runs/gpt" in error
    assert error.rstrip().endswith(f"give --run_dir {moved}"), "no file that is gone"

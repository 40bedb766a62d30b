"""`anlit fit --name --tags`: the default folder, its further tries, and where the name is shown."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from anlit.cli import main
from anlit.errors import UserError
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.run_folder import lock_run_folder
from tests.integration.cases import slow_cases
from tests.integration.conftest import (
    Train,
    fit_arguments,
    last_checkpoint,
    signal_at,
    stop_and_continue,
)
from tests.integration.ranks import DDP, FSDP, run_ranks
from tests.integration.run_files import config_of, contents, file_names, record_of


def named(shards: Path, *extra: str, steps: int = 3) -> list[str]:
    """The command line of a tiny run without --run_dir, named `wide`."""
    arguments = fit_arguments(shards, Path("unused"), f"--trainer.max_steps={steps}", "--name=wide")
    arguments.remove("--run_dir=unused")
    return [*arguments, *extra]


@pytest.fixture(scope="module")
def trained_try(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `runs/wide`, trained with two tags."""
    folder = tmp_path_factory.mktemp("try")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(named(shards, "--tags=baseline,english")) == 0
    return folder


@pytest.fixture
def first_try(trained_try: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/wide` in the working directory, trained with two tags."""
    shutil.copytree(trained_try, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("runs/wide")


def test_a_second_try_takes_the_next_folder_and_says_so(
    shards: Path, first_try: Path, capfd
) -> None:
    contents_before = contents(first_try)
    capfd.readouterr()

    assert main(named(shards)) == 0

    assert contents(first_try) == contents_before
    assert record_of(first_try)["name"] == record_of(Path("runs/wide-2"))["name"] == "wide"
    assert record_of(first_try)["tags"] == ["baseline", "english"]
    assert config_of(Path("runs/wide-2"))["run_dir"] == "runs/wide-2"
    line, _ = capfd.readouterr().out.split("\n", 1)
    assert line == (
        "runs/wide holds a run (finished), so this run takes runs/wide-2: continue it with "
        "--run_dir runs/wide-2 --ckpt_path last, the other with --ckpt_path last alone"
    )


def test_last_is_of_the_first_try_and_a_checkpoint_of_its_own(
    shards: Path, first_try: Path, capfd
) -> None:
    """A continued run keeps its name and its tags, also if the command does not repeat them."""
    assert main(named(shards)) == 0
    capfd.readouterr()

    assert main(named(shards, "--ckpt_path=last", steps=4)) == 0
    line, _ = capfd.readouterr().out.split("\n", 1)
    assert line == "ckpt_path=last is of runs/wide: for runs/wide-2 give --run_dir runs/wide-2 too"
    second = "runs/wide-2/checkpoints/last.ckpt"
    assert main(named(shards, f"--ckpt_path={second}", steps=5)) == 0
    without_name = named(shards, "--run_dir=runs/wide", "--ckpt_path=last", steps=6)
    without_name.remove("--name=wide")
    assert main(without_name) == 0

    assert last_checkpoint(Path("runs/wide"))["global_step"] == 6
    assert last_checkpoint(Path("runs/wide-2"))["global_step"] == 5
    assert record_of(first_try)["name"] == "wide"
    assert record_of(first_try)["tags"] == ["baseline", "english"]
    assert file_names(Path("runs")) == {"wide", "wide-2"}


def test_a_folder_in_which_another_process_starts_is_not_taken(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process holds the lock of `runs/wide`, and has written nothing else there."""
    monkeypatch.chdir(tmp_path)
    Path("runs/wide").mkdir(parents=True)
    with lock_run_folder("runs/wide"):
        assert run_ranks(named(shards), 1) == [0]
    assert not Path("runs/wide/run.json").exists()
    assert record_of(Path("runs/wide-2"))["status"] == "finished"


@pytest.mark.parametrize(
    "count", ["SLURM_RESTART_COUNT", *slow_cases(["TORCHELASTIC_RESTART_COUNT"])]
)
def test_a_job_that_is_started_again_takes_no_other_folder(
    shards: Path, first_try: Path, monkeypatch: pytest.MonkeyPatch, refusal, count: str
) -> None:
    monkeypatch.setenv(count, "1")
    contents_before = contents(first_try)

    error = refusal(*named(shards))
    assert "run_dir=runs/wide already holds a run: continue it with --ckpt_path last" in error
    assert contents(first_try) == contents_before
    assert main(named(shards, "--ckpt_path=last", steps=4)) == 0

    assert os.listdir("runs") == ["wide"]
    assert last_checkpoint(first_try)["global_step"] == 4


@pytest.mark.parametrize(
    "strategy", [pytest.param(DDP, id="ddp"), pytest.param(FSDP, id="fsdp", marks=pytest.mark.slow)]
)
def test_all_ranks_take_the_same_next_folder(
    shards: Path, first_try: Path, strategy: list[str]
) -> None:
    assert run_ranks(named(shards, *strategy), 2) == [0, 0]

    assert sorted(os.listdir("runs")) == ["wide", "wide-2"]
    assert last_checkpoint(Path("runs/wide-2"))["global_step"] == 3
    assert len(record_of(Path("runs/wide-2"))["launches"][0]["hardware"]["devices"]) == 2


def test_ranks_that_find_different_folders_refuse(tmp_path: Path) -> None:
    """The second rank looked when another run had begun in the first rank's folder."""
    decisions = []
    strategy = SimpleNamespace(
        broadcast=lambda _: "runs/wide",
        reduce_boolean_decision=lambda agrees: decisions.append(agrees) or agrees,
    )
    trainer: Any = SimpleNamespace(strategy=strategy)
    sentence = "another run began in runs/wide-2 while the processes of this one started: start it"

    RunRecord("runs/wide").setup(trainer, LightningModule(), "fit")
    with pytest.raises(UserError, match=sentence):
        RunRecord("runs/wide-2").setup(trainer, LightningModule(), "fit")

    assert decisions == [True, False], "all ranks decide together"


def test_a_named_run_that_is_killed_goes_on_in_its_folder(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Train
) -> None:
    """Name and tags change no bit: the undisturbed run has neither."""
    whole = trained("--trainer.max_steps=20")
    monkeypatch.chdir(tmp_path)

    arguments = named(shards, "--tags=[a, b]", steps=20)
    stop_and_continue(arguments, Path("runs/wide"), whole, signal_at("SIGKILL", 12))

    assert os.listdir("runs") == ["wide"]
    assert record_of(Path("runs/wide"))["tags"] == ["a", "b"]


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--name=a/b", "name='a/b' does not name a folder: give letters, digits and ._+=-"),
        ("--name=my run", "name='my run' does not name a folder"),
        ("--name=.hidden", "name='.hidden' does not name a folder"),
        ("--name=", "name='' does not name a folder"),
        (f"--name={'ä' * 65}", "and 128 bytes at most"),
        ("--tags=a,,b", "tags='a,,b' has the tag '': give 1 to 64 letters each"),
        (f"--tags={'x' * 65}", "give 1 to 64 letters each"),
    ],
)
def test_a_name_that_no_folder_has_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal, option: str, error: str
) -> None:
    monkeypatch.chdir(tmp_path)

    assert error in refusal(*named(shards, option))

    assert os.listdir(tmp_path) == []

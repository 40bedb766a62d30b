"""A checkpoint whose callbacks' states name paths: they are not read, so nothing there is removed or uploaded."""

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit import GPT
from tests.integration.conftest import fit_arguments, run
from tests.models.tiny import adamw, batches, tiny


def change_states(source: Path, target: Path, **state: Any) -> Path:
    """A copy of a checkpoint in which every ModelCheckpoint's state has these values."""
    content = torch.load(source, weights_only=True)
    states = [held for held in content["callbacks"].values() if "best_model_path" in held]
    assert states
    for held in states:
        held |= state
    torch.save(content, target)
    return target


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """A file in a folder of somebody's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    return tmp_path / "home" / "thesis.txt"


def poisoned(source: Path, target: Path, path: str) -> Path:
    paths = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), path)
    worst = torch.tensor(9e9)
    return change_states(source, target, **paths, best_k_models={path: worst}, kth_value=worst)


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_trainer_of_ones_own_removes_nothing_that_a_checkpoint_names(tmp_path: Path, thesis: Path, scheme) -> None:
    data, quiet = batches(64, 16), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)

    def trained(folder: Path, max_steps: int, ckpt_path: Path | None = None) -> L.Trainer:
        kept = ModelCheckpoint(folder, "{step}", monitor="train/loss", save_top_k=1, every_n_train_steps=1)
        callbacks = [kept, ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False)]
        trainer = L.Trainer(max_steps=max_steps, accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
        trainer.fit(tiny(GPT, optimizer=adamw(lr=0.01)), data, ckpt_path=ckpt_path)
        return trainer

    trained(tmp_path / "checkpoints", 2)
    foreign = poisoned(tmp_path / "checkpoints/last.ckpt", tmp_path / "foreign.ckpt", f"{scheme}{thesis.parent}")
    second = trained(tmp_path, 4, foreign)
    assert second.global_step == 4
    assert thesis.read_text() == "years of work"
    assert not any(str(thesis.parent) in callback.best_model_path for callback in second.checkpoint_callbacks)


def test_fit_removes_nothing_that_a_checkpoint_names(
    shards: Path, finished: Path, tmp_path: Path, thesis: Path
) -> None:
    foreign = poisoned(finished / "checkpoints/last.ckpt", tmp_path / "foreign.ckpt", f"local://{thesis.parent}")
    arguments = fit_arguments(shards, tmp_path / "run", "--trainer.val_check_interval=4", f"--ckpt_path={foreign}")
    assert run(arguments) == 0
    assert thesis.read_text() == "years of work"


def test_a_continued_run_keeps_its_best_checkpoint_where_later_ones_are_worse(
    shards: Path, finished: Path, tmp_path: Path
) -> None:
    """The score comes from the checkpoint, the path from the run's own folder."""
    folder = shutil.copytree(finished, tmp_path / "run")
    last, best = (folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    change_states(last, last, best_model_score=torch.tensor(0.0))  # no later loss is below it
    before = best.read_bytes()
    assert run(fit_arguments(shards, folder, "--ckpt_path=last")) == 0
    assert best.read_bytes() == before

"""Links out of a run folder, and paths in a checkpoint: no file outside changes."""

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit import GPT
from anlit.checkpoints.checkpoint_io import AtomicCheckpointIO, read_checkpoint
from anlit.checkpoints.location import CHECKPOINTS, SHARDED
from anlit.checkpoints.writing import remove_unnamed
from tests.integration.conftest import fit_arguments, run
from tests.nn.models.tiny import adamw, batches, tiny

SHORT = ("--trainer.max_steps=2", "--trainer.val_check_interval=2", "--ckpt_path=last")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that belongs to no run."""
    (tmp_path / "outside" / "last-1").mkdir(parents=True)
    for name in ("last-1/text", "last.ckpt"):
        (tmp_path / "outside" / name).write_text("keep")
    return tmp_path / "outside"


def content(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_partial_file_that_is_a_link_is_replaced(
    shards: Path, tmp_path: Path, outside: Path
) -> None:
    content_before, checkpoints = content(outside), tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    (checkpoints / ".partial-last.ckpt").symlink_to(outside / "last.ckpt")
    assert run(fit_arguments(shards, tmp_path / "run", *SHORT)) == 0
    assert content(outside) == content_before
    assert not (checkpoints / "last.ckpt").is_symlink()


@pytest.mark.parametrize(
    "name", ["metrics.csv", ".fit.lock", CHECKPOINTS, f"{CHECKPOINTS}/{SHARDED}"]
)
def test_nothing_of_a_run_is_written_through_a_link(
    shards: Path, tmp_path: Path, outside: Path, name: str, refusal
):
    content_before, path = content(outside), tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    target = outside if CHECKPOINTS in name else outside / "last.ckpt"
    path.symlink_to(target)
    error = refusal(*fit_arguments(shards, tmp_path / "run", *SHORT))
    assert f"{path} is a link to {target}, and a run writes into its own folder" in error
    assert content(outside) == content_before


def test_what_is_a_link_or_has_a_name_is_no_leftover(tmp_path: Path, outside: Path) -> None:
    """Nor is a folder that had another name first, or that belongs to another run."""
    content_before, folder = content(outside), tmp_path / "run" / SHARDED
    (folder / "last-2").mkdir(parents=True)
    (folder / "last-0").symlink_to(outside, target_is_directory=True)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / SHARDED).symlink_to(outside, target_is_directory=True)
    for checkpoints in ("run", "linked"):
        remove_unnamed(tmp_path / checkpoints)
    assert [path.name for path in folder.iterdir()] == ["last-0"]
    assert content(outside) == content_before
    own_folder, foreign_folder = folder / "last-1", tmp_path / "other" / SHARDED / "last-2"
    best, last = (tmp_path / "run" / name for name in ("best.ckpt", "last.ckpt"))
    for named, link in ((own_folder, best), (foreign_folder, last)):
        named.mkdir(parents=True)
        link.symlink_to(named)
    storage = AtomicCheckpointIO()
    storage.save_checkpoint({"step": 1}, last)
    assert read_checkpoint(last) == {"step": 1}
    assert foreign_folder.is_dir()
    storage.remove_checkpoint(best)
    assert own_folder.is_dir(), "this process did not write it"
    storage.written.add(str(best))
    storage.remove_checkpoint(best)
    assert not own_folder.exists()


def change_states(source: Path, target: Path, **state: Any) -> None:
    """Write a copy of a checkpoint in which every ModelCheckpoint's state has these values."""
    content = torch.load(source, weights_only=True)
    states = [
        state_of_callback
        for state_of_callback in content["callbacks"].values()
        if "best_model_path" in state_of_callback
    ]
    assert states
    for state_of_callback in states:
        state_of_callback |= state
    torch.save(content, target)


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_trainer_of_ones_own_removes_nothing_that_a_checkpoint_names(
    tmp_path: Path, outside: Path, scheme
) -> None:
    data, quiet = (
        batches(64, 16),
        dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False),
    )

    def fit(folder: Path, max_steps: int, ckpt_path: Path | None = None) -> L.Trainer:
        best_checkpoints = ModelCheckpoint(
            folder, "{step}", monitor="train/loss", save_top_k=1, every_n_train_steps=1
        )
        callbacks = [
            best_checkpoints,
            ModelCheckpoint(folder, "last", every_n_train_steps=1, enable_version_counter=False),
        ]
        trainer = L.Trainer(
            max_steps=max_steps, accelerator="cpu", devices=1, callbacks=callbacks, **quiet
        )
        trainer.fit(tiny(GPT, optimizer=adamw(lr=0.01)), data, ckpt_path=ckpt_path)
        return trainer

    content_before = content(outside)
    fit(tmp_path / "checkpoints", 2)
    path, foreign, worst = f"{scheme}{outside}", tmp_path / "foreign.ckpt", torch.tensor(9e9)
    paths = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), path)
    states = {**paths, "best_k_models": {path: worst}, "kth_value": worst}
    change_states(tmp_path / "checkpoints" / "last.ckpt", foreign, **states)
    second = fit(tmp_path, 4, foreign)
    assert second.global_step == 4
    assert content(outside) == content_before
    assert not any(
        str(outside) in callback.best_model_path for callback in second.checkpoint_callbacks
    )


def test_a_continued_run_keeps_its_best_checkpoint_where_later_ones_are_worse(
    shards: Path, finished: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    last, best = (folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    lowest = torch.tensor(0.0)  # no later loss is below it
    change_states(last, last, best_k_models={"best.ckpt": lowest}, best_model_score=lowest)
    content_before = best.read_bytes()
    assert run(fit_arguments(shards, folder, "--ckpt_path=last")) == 0
    assert best.read_bytes() == content_before

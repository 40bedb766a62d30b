"""A run that is stopped and resumed sees exactly the batches of one that is not."""

import contextlib
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit.data import TextFiles, TokenShards
from anlit.data.batch import Batch
from anlit.errors import UserError

CONTEXT = 64
BATCH = 64
BATCHES_PER_EPOCH = 11


class Recorder(L.LightningModule):
    """One weight, and a record of the batches it was trained on."""

    context_length = CONTEXT
    vocab_size = 320

    def __init__(self, crash_after: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.crash_after = crash_after
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.crash_after:
            raise CrashError
        self.seen.append(batch.tokens.clone())
        return self.weight.sum() * batch.tokens.float().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class CrashError(Exception):
    """What ends an interrupted run."""


def run(
    path: str,
    workers: int = 0,
    start: Path | None = None,
    save: Path | None = None,
    finish: Path | None = None,
    **options,
) -> list[torch.Tensor]:
    """Train; the batches in their order.

    `start`, `save` and `finish` are checkpoints named by their step: where to start, what to save before
    crashing two batches later, what to save after the end. `options` that TokenShards has go there, the
    others to the Trainer.
    """
    save_at = int(save.stem) if save is not None else 0
    data = {key: options.pop(key) for key in ("seed", "shuffle") if key in options}
    callbacks: list[L.Callback] = []
    if save is not None:
        callbacks.append(ModelCheckpoint(save.parent, save.stem, every_n_train_steps=save_at, save_top_k=-1))
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=0.5,
        limit_val_batches=1,
        **options,
    )
    done = int(start.stem) if start is not None else 0
    model = Recorder(crash_after=save_at + 2 - done if save is not None else -1)
    with pytest.raises(CrashError) if save is not None else contextlib.nullcontext():
        trainer.fit(model, TokenShards(path, BATCH, num_workers=workers, **data), ckpt_path=start)
        if finish is not None:
            trainer.save_checkpoint(finish)
    return model.seen[: save_at - done] if save is not None else model.seen


@pytest.fixture(scope="module", params=[0, 2], ids=["no workers", "2 workers"])
def uninterrupted(request: pytest.FixtureRequest, tiny_shards: str) -> tuple[int, list[torch.Tensor]]:
    return request.param, run(tiny_shards, request.param, max_epochs=3)


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    assert [index for index, (a, b) in enumerate(zip(left, right, strict=True)) if not torch.equal(a, b)] == []


def test_epochs_have_the_same_blocks_in_different_orders(uninterrupted: tuple[int, list[torch.Tensor]]) -> None:
    _, seen = uninterrupted
    assert len(seen) == 3 * BATCHES_PER_EPOCH
    assert {tuple(batch.shape) for batch in seen} == {(BATCH, CONTEXT)}
    epochs = [torch.cat(seen[start : start + BATCHES_PER_EPOCH]) for start in (0, BATCHES_PER_EPOCH)]
    assert not torch.equal(epochs[0], epochs[1])
    rows = [{tuple(row) for row in epoch.tolist()} for epoch in epochs]
    assert len(rows[0]) == BATCHES_PER_EPOCH * BATCH
    assert len(rows[0] & rows[1]) > 0.85 * len(rows[0])  # the last, incomplete batch differs


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_steps": 3 * BATCHES_PER_EPOCH}], ids=["epochs", "steps"])
@pytest.mark.parametrize("stop", [4, BATCHES_PER_EPOCH, BATCHES_PER_EPOCH + 5])
def test_resume_continues_with_the_batches_to_come(
    stop: int, limit: dict[str, int], uninterrupted: tuple[int, list[torch.Tensor]], tiny_shards: str, tmp_path: Path
) -> None:
    workers, expected = uninterrupted
    saved = tmp_path / f"{stop}.ckpt"
    before = run(tiny_shards, workers, save=saved, **limit)
    after = run(tiny_shards, workers, start=saved, **limit)
    assert_same(before + after, expected)


def test_a_finished_run_can_be_prolonged(tiny_shards: str, tmp_path: Path) -> None:
    finished = tmp_path / f"{BATCHES_PER_EPOCH}.ckpt"
    before = run(tiny_shards, finish=finished, max_epochs=1)
    after = run(tiny_shards, start=finished, max_epochs=3)
    assert_same(before + after, run(tiny_shards, max_epochs=3))


def test_resume_twice(tiny_shards: str, tmp_path: Path) -> None:
    first, second = tmp_path / "4.ckpt", tmp_path / "7.ckpt"
    seen = run(tiny_shards, save=first, max_epochs=2)
    seen += run(tiny_shards, start=first, save=second, max_epochs=2)
    seen += run(tiny_shards, start=second, max_epochs=2)
    assert_same(seen, run(tiny_shards, max_epochs=2))


def test_resume_where_the_folder_was_moved(tiny_shards: str, tmp_path: Path) -> None:
    saved = tmp_path / "4.ckpt"
    before = run(tiny_shards, save=saved, max_steps=8)
    shutil.copytree(tiny_shards, tmp_path / "moved")
    after = run(str(tmp_path / "moved"), start=saved, max_steps=8)
    assert_same(before + after, run(tiny_shards, max_steps=8))


@pytest.mark.parametrize(("stop", "left_out"), [(4, 1), (5, 0), (BATCHES_PER_EPOCH, 0)])
def test_another_number_of_workers_finishes_the_epoch_without_repeats(
    stop: int, left_out: int, tiny_shards: str, tmp_path: Path
) -> None:
    """litdata deals what is left of the epoch evenly to the new workers; 7 batches give 3 to each of 2."""
    saved = tmp_path / f"{stop}.ckpt"
    before = run(tiny_shards, save=saved, max_epochs=2)
    seen = before + run(tiny_shards, workers=2, start=saved, max_epochs=2)
    first_epoch = BATCHES_PER_EPOCH - left_out
    for epoch in (seen[:first_epoch], seen[first_epoch:]):
        rows = [tuple(row) for batch in epoch for row in batch.tolist()]
        assert len(set(rows)) == len(rows) == len(epoch) * BATCH
    assert len(seen) - first_epoch == BATCHES_PER_EPOCH


@pytest.mark.parametrize(
    ("change", "message"), [({"seed": 1}, "--data.seed 42 and this run has 1"), ({"shuffle": False}, "--data.shuffle")]
)
def test_resume_in_another_order_is_refused(change: dict, message: str, tiny_shards: str, tmp_path: Path) -> None:
    saved = tmp_path / "4.ckpt"
    run(tiny_shards, save=saved, max_epochs=2)
    with pytest.raises(UserError, match=message):
        run(tiny_shards, start=saved, max_epochs=2, **change)


def test_resume_on_other_texts_is_refused(tiny_shards: str, tiny_text: Path, tmp_path: Path) -> None:
    saved = tmp_path / "4.ckpt"
    run(tiny_shards, save=saved, max_epochs=2)
    other = TextFiles(str(tiny_text / "part0"), str(tmp_path / "other"), vocab_size=320, val_fraction=0.2)
    other.prepare_data()
    with pytest.raises(UserError, match=r"place in the data is for --data\.path"):
        run(other.path, start=saved, max_epochs=2)

"""A run that is stopped and resumed sees exactly the batches of one that is not."""

import contextlib
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from anlit.data.module import TokenShards
from anlit.errors import UserError
from tests.data.modules import CrashError, Recorder, Rows, all_blocks, quiet_trainer, ready
from tests.data.processes import on_two_devices

BATCH = 48
EPOCH = 14  # batches of 48 in 718 blocks; 46 blocks are left over for the next
STEPS = 3 * EPOCH
BY_STEPS, BY_EPOCHS = {"max_steps": STEPS}, {"max_epochs": 3, "max_steps": -1}
Data = Callable[..., TokenShards]


def run(
    data: TokenShards, start: Path | None = None, stop: int | None = None, **trainer: Any
) -> list[Rows]:
    """Train to STEPS, or save a checkpoint `<folder of start>/<stop>.ckpt` and crash two batches later."""
    callbacks: list[L.Callback] = []
    done = int(start.stem) if start is not None else 0
    if stop is not None:
        folder = trainer.pop("folder")
        callbacks.append(
            ModelCheckpoint(folder, str(stop), every_n_train_steps=stop, save_top_k=-1)
        )
    limits = {"max_steps": STEPS, "val_check_interval": 0.5, "limit_val_batches": 1, **trainer}
    fitting = quiet_trainer(callbacks=callbacks, enable_checkpointing=bool(callbacks), **limits)
    model = Recorder(crash_after=stop + 2 - done if stop is not None else -1)
    with pytest.raises(CrashError) if stop is not None else contextlib.nullcontext():
        fitting.fit(model, data, ckpt_path=start)
    data.teardown("fit")  # Lightning calls it only at the end of a run that did not fail
    return model.seen if stop is None else model.seen[: stop - done]


def interrupted(make: Data, folder: Path, stops: list[int], **trainer: Any) -> list[Rows]:
    """The batches of a run that is stopped at each of these steps and continued."""
    seen = []
    for before, stop in pairwise([0, *stops]):
        start = folder / f"{before}.ckpt" if before else None
        seen += run(make(), start, stop, folder=folder, **trainer)
    return seen + run(make(), folder / f"{stops[-1]}.ckpt", **trainer)


@pytest.fixture
def make(prepared: str) -> Data:
    return lambda **changes: TokenShards(prepared, **{"batch_size": BATCH, **changes})


@pytest.fixture(scope="module")
def whole(prepared: str) -> list[Rows]:
    return run(TokenShards(prepared, BATCH))


def test_every_block_comes_once_before_any_comes_again(
    whole: list[Rows], streams: dict[str, np.ndarray]
) -> None:
    """The end of a pass is in the middle of an epoch and of a batch, and nothing is left out there."""
    rows = [row for batch in whole for row in batch]
    blocks = list(map(tuple, all_blocks(streams["train"])))
    assert len(rows) == STEPS * BATCH == 2 * len(blocks) + 580
    first, second = rows[: len(blocks)], rows[len(blocks) : 2 * len(blocks)]
    assert sorted(first) == sorted(second) == sorted(blocks)
    assert len({str(order) for order in (first, second, blocks)}) == 3


@pytest.mark.parametrize(("workers", "stops", "limit"), [
    (0, [9, 37], BY_STEPS), (1, [4, 6], BY_EPOCHS), (2, [16, 38], BY_STEPS), (4, [17, 23], BY_EPOCHS),
    *((0, stops, limit) for stops in ([EPOCH], [EPOCH - 1, EPOCH + 1]) for limit in (BY_STEPS, BY_EPOCHS)),
])  # fmt: skip
def test_resume(
    workers: int, stops: list[int], limit: Any, make: Data, whole: list[Rows], tmp_path: Path
) -> None:
    assert interrupted(lambda: make(num_workers=workers), tmp_path, stops, **limit) == whole


@pytest.mark.parametrize("how", [{"max_epochs": 1, "max_steps": -1}, {"max_steps": 20}])
def test_a_finished_run_can_be_prolonged(
    how: Any, make: Data, whole: list[Rows], tmp_path: Path
) -> None:
    data, model, trainer = (
        make(num_workers=2),
        Recorder(),
        quiet_trainer(limit_val_batches=0, **how),
    )
    trainer.fit(model, data)
    trainer.save_checkpoint(saved := tmp_path / f"{len(model.seen)}.ckpt")
    assert model.seen + run(make(), saved) == whole


def test_another_run_with_the_same_data_begins_at_the_start(make: Data, whole: list[Rows]) -> None:
    """Also after one that failed, where Lightning does not call teardown."""
    data = make()
    for crash_after in (3, -1):
        model = Recorder(crash_after)
        with pytest.raises(CrashError) if crash_after > 0 else contextlib.nullcontext():
            quiet_trainer(limit_val_batches=0, max_steps=5).fit(model, data)
        assert model.seen == whole[: len(model.seen)]
    assert len(model.seen) == 5


@pytest.mark.parametrize(("change", "said"), [
    ({"num_workers": 2}, "num_workers 0 → 2"), ({"batch_size": 36}, "batch_size 48 → 36")])  # fmt: skip
def test_other_workers_or_another_batch_size_go_on_after_the_last_sequence(
    change: dict[str, int],
    said: str,
    make: Data,
    whole: list[Rows],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "anlit")
    before = run(make(), stop=11, folder=tmp_path)
    assert "Resuming" not in caplog.text
    after = run(make(**change), tmp_path / "11.ckpt")
    assert len(after) == STEPS - 11
    rows, expected = (
        [row for batch in batches for row in batch] for batches in (before + after, whole)
    )
    assert rows == expected[: len(rows)]
    assert (
        f"Resuming with {said}: the data go on after sequence {11 * BATCH}, none is repeated"
        in caplog.text
    )


def test_resume_on_two_devices(make: Data, whole: list[Rows], tmp_path: Path) -> None:
    """Also from one device to two and back: the global batches are those of one device with twice the batch size."""

    def together(start: int, **options: Any) -> list[Rows]:
        options |= {
            "data": make(batch_size=BATCH // 2, num_workers=2),
            "start": tmp_path / f"{start}.ckpt",
        }
        ranks = on_two_devices(run, devices=2, strategy="ddp", folder=tmp_path, **options)
        return [one + two for one, two in zip(*ranks, strict=True)]

    before = run(make(num_workers=1), stop=9, folder=tmp_path)
    assert (
        before + together(9, stop=20) + together(20, stop=31) + run(make(), tmp_path / "31.ckpt")
        == whole
    )


@pytest.mark.parametrize(("change", "message"), [
    ({"seed": 1}, "--data.seed 42 and this run has 1"),
    ({"shuffle": False}, r"--data.shuffle True and this run has False"),
    ({"context_length": 32}, "--model.context_length 64 and this run has 32"),
    ({"weights": {"web": 1, "code": 2}}, r"for --data.weights {'web': 1, 'code': 1} and this run has"),
    ({"path": "prepared", "weights": None}, r"place in the data is for --data\.path"),
])  # fmt: skip
def test_a_place_in_another_order_or_in_other_data(
    change: dict, message: str, subsets: Any, prepared: str
) -> None:
    own = {"path": subsets[0], "weights": {"web": 1, "code": 1}}
    data, other = (
        ready(**own),
        ready(**own | change | ({"path": prepared} if "path" in change else {})),
    )
    next(iter(data.train_dataloader()))
    other.load_state_dict(data.state_dict())
    with pytest.raises(UserError, match=message):
        other.train_dataloader()

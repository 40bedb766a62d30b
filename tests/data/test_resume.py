"""A run that is stopped and resumed sees exactly the batches of a run without a stop."""

import contextlib
import logging
from collections.abc import Callable
from itertools import chain, pairwise
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
EPOCH = 14  # batches of 48 in 718 blocks; 46 blocks are left over for the next epoch
STEPS = 3 * EPOCH
BY_STEPS = {"max_steps": STEPS}
BY_EPOCHS = {"max_epochs": 3, "max_steps": -1}
MakeData = Callable[..., TokenShards]


def crash(expected: bool) -> Any:
    """Return a context that expects a crash, or none."""
    return pytest.raises(CrashError) if expected else contextlib.nullcontext()


def train(
    data: TokenShards,
    start: Path | None = None,
    stop: int | None = None,
    folder: Path | None = None,
    **options: Any,
) -> list[Rows]:
    """Train from the checkpoint `start`, named by its step, to STEPS; return the batches.

    `stop` saves a checkpoint `<folder>/<stop>.ckpt` and crashes two batches later. The result
    is the batches up to the checkpoint.
    """
    callbacks: list[L.Callback] = []
    crash_after = -1
    first_step = int(start.stem) if start is not None else 0
    if stop is not None:
        crash_after = stop + 2 - first_step
        callbacks = [ModelCheckpoint(folder, str(stop), every_n_train_steps=stop, save_top_k=-1)]
    limits = {"max_steps": STEPS, "val_check_interval": 0.5, "limit_val_batches": 1}
    trainer = quiet_trainer(
        callbacks=callbacks, enable_checkpointing=bool(callbacks), **{**limits, **options}
    )
    model = Recorder(crash_after)
    with crash(expected=stop is not None):
        trainer.fit(model, data, ckpt_path=start)
    data.teardown("fit")  # Lightning calls it only at the end of a run that did not fail
    return model.seen if stop is None else model.seen[: stop - first_step]


def train_with_stops(make: MakeData, folder: Path, stops: list[int], **options: Any) -> list[Rows]:
    """Return the batches of a run that is stopped at each of these steps and continued."""
    batches = []
    for start_step, stop in pairwise([0, *stops]):
        start = folder / f"{start_step}.ckpt" if start_step else None
        batches += train(make(), start, stop, folder, **options)
    return batches + train(make(), folder / f"{stops[-1]}.ckpt", **options)


@pytest.fixture
def make(prepared: str) -> MakeData:
    return lambda **changes: TokenShards(prepared, **{"batch_size": BATCH, **changes})


@pytest.fixture(scope="module")
def unstopped(prepared: str) -> list[Rows]:
    """The batches of a run without a stop."""
    return train(TokenShards(prepared, BATCH))


def test_every_block_comes_once_before_any_comes_again(
    unstopped: list[Rows], streams: dict[str, np.ndarray]
) -> None:
    """A pass ends in the middle of an epoch and of a batch. Nothing is left out there."""
    rows = list(chain.from_iterable(unstopped))
    blocks = [tuple(block) for block in all_blocks(streams["train"])]
    assert len(rows) == STEPS * BATCH == 2 * len(blocks) + 580

    first_pass = rows[: len(blocks)]
    second_pass = rows[len(blocks) : 2 * len(blocks)]

    assert sorted(first_pass) == sorted(blocks)
    assert sorted(second_pass) == sorted(blocks)
    assert first_pass != second_pass
    assert blocks not in (first_pass, second_pass)


@pytest.mark.parametrize(
    ("workers", "stops", "limit"),
    [
        (0, [9, 37], BY_STEPS),
        pytest.param(1, [4, 6], BY_EPOCHS, marks=pytest.mark.slow),
        (2, [16, 38], BY_STEPS),
        (4, [17, 23], BY_EPOCHS),
        (0, [EPOCH], BY_STEPS),
        pytest.param(0, [EPOCH], BY_EPOCHS, marks=pytest.mark.slow),
        pytest.param(0, [EPOCH - 1, EPOCH + 1], BY_STEPS, marks=pytest.mark.slow),
        (0, [EPOCH - 1, EPOCH + 1], BY_EPOCHS),
    ],
)
def test_a_resumed_run_has_the_batches_of_an_unstopped_run(
    workers: int,
    stops: list[int],
    limit: Any,
    make: MakeData,
    unstopped: list[Rows],
    tmp_path: Path,
) -> None:
    make_with_workers = lambda: make(num_workers=workers)  # noqa: E731

    assert train_with_stops(make_with_workers, tmp_path, stops, **limit) == unstopped


@pytest.mark.parametrize("limit", [{"max_epochs": 1, "max_steps": -1}, {"max_steps": 20}])
def test_a_finished_run_can_be_prolonged(
    limit: Any, make: MakeData, unstopped: list[Rows], tmp_path: Path
) -> None:
    model = Recorder()
    trainer = quiet_trainer(limit_val_batches=0, **limit)
    trainer.fit(model, make(num_workers=2))
    checkpoint = tmp_path / f"{len(model.seen)}.ckpt"
    trainer.save_checkpoint(checkpoint)

    assert model.seen + train(make(), checkpoint) == unstopped


def test_another_run_with_the_same_data_begins_at_the_start(
    make: MakeData, unstopped: list[Rows]
) -> None:
    """Also after a run that failed: Lightning does not call its teardown."""
    data = make()
    for crash_after in (3, -1):
        model = Recorder(crash_after)
        with crash(expected=crash_after > 0):
            quiet_trainer(limit_val_batches=0, max_steps=5).fit(model, data)
        assert model.seen == unstopped[: len(model.seen)]
    assert len(model.seen) == 5


@pytest.mark.parametrize(
    ("change", "logged_change"),
    [({"num_workers": 2}, "num_workers 0 → 2"), ({"batch_size": 36}, "batch_size 48 → 36")],
)
def test_other_workers_or_another_batch_size_continue_after_the_last_sequence(
    change: dict[str, int],
    logged_change: str,
    make: MakeData,
    unstopped: list[Rows],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "anlit")
    stopped = train(make(), stop=11, folder=tmp_path)
    assert "Resuming" not in caplog.text

    resumed = train(make(**change), tmp_path / "11.ckpt")

    assert len(resumed) == STEPS - 11
    rows = list(chain.from_iterable(stopped + resumed))
    expected_rows = list(chain.from_iterable(unstopped))
    assert rows == expected_rows[: len(rows)]
    continued = f"the data go on after sequence {11 * BATCH}, none is repeated"
    assert f"Resuming with {logged_change}: {continued}" in caplog.text


def test_a_run_can_move_to_two_devices_and_back(
    make: MakeData, unstopped: list[Rows], tmp_path: Path
) -> None:
    """A device with twice the batch size has the same global batches."""

    def train_on_two_devices(first_step: int, stop: int) -> list[Rows]:
        batches_of_ranks = on_two_devices(
            train,
            data=make(batch_size=BATCH // 2, num_workers=2),
            start=tmp_path / f"{first_step}.ckpt",
            stop=stop,
            folder=tmp_path,
            devices=2,
            strategy="ddp",
        )
        return [rank_0 + rank_1 for rank_0, rank_1 in zip(*batches_of_ranks, strict=True)]

    batches = train(make(num_workers=1), stop=9, folder=tmp_path)
    batches += train_on_two_devices(9, stop=20)
    batches += train_on_two_devices(20, stop=31)
    batches += train(make(), tmp_path / "31.ckpt")

    assert batches == unstopped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "--data.seed 42 and this run has 1"),
        ({"shuffle": False}, "--data.shuffle True and this run has False"),
        ({"context_length": 32}, "--model.context_length 64 and this run has 32"),
        (
            {"weights": {"web": 1, "code": 2}},
            r"for --data.weights {'web': 1, 'code': 1} and this run has",
        ),
        ({"path": "prepared", "weights": None}, r"position in the data is for --data\.path"),
    ],
)
def test_a_position_in_other_data_or_in_another_order_is_refused(
    change: dict, message: str, subsets: Any, prepared: str
) -> None:
    settings = {"path": subsets[0], "weights": {"web": 1, "code": 1}}
    data = ready(**settings)
    next(iter(data.train_dataloader()))

    changed_settings = {**settings, **change}
    if "path" in change:
        changed_settings["path"] = prepared
    changed_data = ready(**changed_settings)
    changed_data.load_state_dict(data.state_dict())

    with pytest.raises(UserError, match=message):
        changed_data.train_dataloader()

"""Reading prepared shards: the validation targets, and settings that do not fit.

The training batches themselves are in tests/golden.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit import GPT, TokenShards
from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from tests.data.modules import LENGTH, Recorder, counted, quiet_trainer, ready
from tests.data.prepared import write_prepared
from tests.data.processes import on_two_devices

N_VAL_BLOCKS = 79  # of 64 targets in the 4999 targets of the validation split
SCHEDULE = {0: 16, 2: 32, 5: LENGTH}
SCHEDULED_SHAPES = [(16, 16), (16, 16), (8, 32), (8, 32), (8, 32), (4, 64)]
"""Sequences and their length in the batches of six steps."""


def make_model(length: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=320, context_length=length, n_layers=1, n_heads=1, d_model=8)


def validation_loss(path: str, length: int = LENGTH, devices: Any = None, **settings: Any) -> float:
    trainer = quiet_trainer(**devices or {})
    model = make_model(length)
    data = TokenShards(path, **settings)
    (metrics,) = trainer.validate(model, data, verbose=False)
    return metrics["val/loss"]


def test_reading_draws_no_random_numbers_of_the_model(prepared: str) -> None:
    state = torch.get_rng_state()

    data = ready(prepared, num_workers=1)
    next(iter(data.train_dataloader()))
    list(data.val_dataloader())
    data.teardown("fit")

    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_counts_every_token_but_the_first_once(
    prepared: str, streams: Any, ranks: int
) -> None:
    n_batches = math.ceil(N_VAL_BLOCKS / (4 * ranks))

    batches_of_ranks = []
    for rank in range(ranks):
        loader = ready(prepared, rank, ranks).val_dataloader()
        batches = list(loader)
        assert len(loader) == n_batches
        assert len(batches) == n_batches
        batches_of_ranks.append(batches)

    in_order = []
    for global_batch in zip(*batches_of_ranks, strict=True):
        in_order += global_batch
    assert counted(in_order) == streams["val"][1:].tolist()
    tokens = torch.cat([batch.tokens.flatten() for batch in in_order])
    assert tokens[:4999].tolist() == streams["val"][:4999].tolist()
    assert not tokens[5000:].any()  # filled up with the end of document, 0


@pytest.mark.parametrize("batch_size", [8, N_VAL_BLOCKS])
def test_validation_loss_on_two_devices_equals_the_loss_on_one(
    prepared: str, batch_size: int
) -> None:
    """The second device has nothing to evaluate in batches of 79."""
    loss = validation_loss(prepared)

    losses = on_two_devices(
        validation_loss,
        path=prepared,
        val_batch_size=batch_size,
        devices={"devices": 2, "strategy": "ddp"},
    )

    assert losses == pytest.approx([loss, loss], rel=1e-6)


def test_validation_can_have_a_longer_context_than_training(prepared: str) -> None:
    data = ready(prepared, context_length=16, val_context_length=256)

    val_batch = next(iter(data.val_dataloader()))
    training_batch = next(iter(data.train_dataloader()))
    assert val_batch.tokens.shape == (4, 256)
    assert training_batch.tokens.shape == (4, 16)
    short_loss = validation_loss(prepared, 16)
    long_loss = validation_loss(prepared, 16, val_context_length=256)
    assert long_loss == pytest.approx(short_loss, rel=0.1)


@pytest.mark.parametrize("n", [1, 100, 10_000])
def test_validation_on_the_first_tokens(prepared: str, streams: Any, n: int, caplog) -> None:
    caplog.set_level(logging.INFO, "anlit")

    batches = list(ready(prepared, val_tokens=n).val_dataloader())

    assert counted(batches) == streams["val"][1 : n + 1].tolist()
    n_rows = sum(len(batch.tokens) for batch in batches)
    assert n_rows == math.ceil(min(n, 4999) / LENGTH)
    assert ("has only 4,999 targets" in caplog.text) == (n > 4999)


def counted_rows(loaders: list[Any]) -> list[list[int]]:
    """Return the counted targets of each row that has some, in the order of the global batches."""
    rows = []
    for batches in zip(*loaders, strict=True):
        for batch in batches:
            rows += [row[row != IGNORE_INDEX].tolist() for row in batch.targets]
    return [row for row in rows if row]


@pytest.mark.covering(2)
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("n_targets", [None, 1000])
@pytest.mark.parametrize("n", [1, 10, 1_000_000])
def test_validation_blocks_are_spread_evenly_over_the_split(
    prepared: str, streams: Any, n: int, n_targets: Any, devices: int, caplog
) -> None:
    """The split is cut into n equal pieces; the middle block of each is read."""
    caplog.set_level(logging.INFO, "anlit")
    targets = streams["val"][1:][:n_targets]
    blocks = np.array_split(targets, range(LENGTH, len(targets), LENGTH))
    n_read = min(n, len(blocks))
    expected = []
    for number in range(n_read):
        middle = int((number + 0.5) * len(blocks) / n_read)
        expected.append(blocks[middle].tolist())

    loaders = []
    for rank in range(devices):
        data = ready(prepared, rank, devices, val_blocks=n, val_tokens=n_targets)
        loaders.append(data.val_dataloader())

    assert counted_rows(loaders) == expected
    message = f" {len(blocks)} blocks of 64 tokens to choose from: --data.val_tokens or"
    assert (message in caplog.text) == (n > len(blocks))


@pytest.mark.parametrize(
    ("options", "n_read"),
    [
        ({"limit_val_batches": 3}, 3),
        ({"limit_val_batches": 0.5}, 9),
        ({"limit_val_batches": 20}, None),
        ({"limit_val_batches": 0}, None),
        ({"fast_dev_run": 2}, None),
        ({"num_sanity_val_steps": 2}, None),
    ],
    ids=str,
)
def test_a_limit_that_reads_only_the_beginning_of_validation_is_logged(
    prepared: str, options: Any, n_read: int | None, caplog
) -> None:
    trainer = quiet_trainer(max_steps=1, devices=1, **options)
    data = TokenShards(prepared, 4, val_batch_size=4, val_blocks=75)

    trainer.fit(Recorder(), data)

    if n_read is None:
        assert "limit_val_batches" not in caplog.text
    else:
        fix = f"set data.val_blocks to {4 * n_read} "
        assert re.search(f"reads the first {n_read} of 19 batches, .* {fix}", caplog.text)


@pytest.fixture
def folder_with_test(tmp_path: Path, streams: dict[str, np.ndarray]) -> str:
    """A prepared folder with a test split of 700 tokens."""
    folder = tmp_path / "with_test"
    write_prepared(folder, {**streams, "test": streams["val"][:700]})
    return str(folder)


def test_a_limit_that_reads_only_the_beginning_of_the_test_is_logged(
    folder_with_test: str, caplog
) -> None:
    trainer = quiet_trainer(devices=1, limit_test_batches=1)
    data = TokenShards(folder_with_test, 4, val_batch_size=4)

    trainer.test(Recorder(), data, verbose=False)

    message = "limit_test_batches=1 reads the first 1 of .*/test and no sample of it: leave the"
    assert re.search(message, caplog.text)


def test_a_test_split_is_read_whole(folder_with_test: str, streams: Any) -> None:
    data = ready(folder_with_test, val_tokens=64)

    assert counted(data.test_dataloader()) == streams["val"][1:700].tolist()


def test_a_corpus_without_a_test_split_has_no_test_loss(prepared: str) -> None:
    with pytest.raises(UserError, match="has no test split: use `anlit validate`"):
        ready(prepared).test_dataloader()


def test_bytes_per_token_are_known_only_for_a_whole_split(folder_with_test: str) -> None:
    data = ready(folder_with_test, val_tokens=64)
    data.manifest["test"]["bytes"] = 5 * 700

    assert data.bytes_per_token("test") == 5
    assert data.bytes_per_token("val") is None
    assert data.bytes_per_token("train") == 3


def test_a_loss_without_first_tokens_has_no_bytes_per_token(folder_with_test: str) -> None:
    """It leaves out a part of the text, and the bytes are of all of it."""
    assert ready(folder_with_test).bytes_per_token("val") == 3

    data = ready(folder_with_test, score_first_token=False)

    assert data.bytes_per_token("val") is None
    assert data.bytes_per_token("test") is None


@pytest.mark.parametrize("vocab_size", [320, 384])  # 320 rounded up to a multiple of 128
def test_the_context_length_is_the_model_s_by_default(prepared: str, vocab_size: int) -> None:
    model = {"context_length": LENGTH, "vocab_size": vocab_size}

    assert ready(prepared, model=model, context_length=None).context_length == LENGTH


def test_training_at_another_context_length_than_the_model_s_is_refused(prepared: str) -> None:
    model = {"context_length": LENGTH, "vocab_size": 320}
    message = r"data\.context_length=32 is not model\.context_length=64: leave it out"

    with pytest.raises(UserError, match=message):
        ready(prepared, model=model, context_length=32)


@pytest.mark.parametrize("vocab_size", [319, 385])
def test_another_vocabulary_than_the_shards_is_refused(prepared: str, vocab_size: int) -> None:
    sizes = rf"vocabulary of {vocab_size} tokens .* have 320"
    message = f"{sizes}: set --model.vocab_size 320 .*vocab_size=320"

    with pytest.raises(UserError, match=message):
        ready(prepared, model={"vocab_size": vocab_size})


def test_data_without_a_context_length_are_refused(prepared: str) -> None:
    with pytest.raises(UserError, match=r"set --data\.context_length"):
        TokenShards(prepared).setup()


def test_a_context_longer_than_the_split_is_refused(prepared: str) -> None:
    ready(prepared, context_length=45_999, batch_size=1)

    message = r"length 46000 is too long .*train, .*--model.context_length to 45999 "
    with pytest.raises(UserError, match=message):
        ready(prepared, context_length=46_000, batch_size=1)


def test_a_global_batch_larger_than_the_split_is_refused(prepared: str) -> None:
    ready(prepared, batch_size=718)

    message = r"batch_size 360 on each of 2 .*needs 720 sequences and .*train has 718 "
    with pytest.raises(UserError, match=message):
        ready(prepared, rank=0, ranks=2, batch_size=360)


def test_a_validation_split_without_a_target_is_refused(
    tmp_path: Path, streams: dict[str, np.ndarray]
) -> None:
    write_prepared(tmp_path / "shards", {**streams, "val": streams["val"][:1]})

    with pytest.raises(UserError, match="val has no token to predict"):
        ready(str(tmp_path / "shards"))


def test_batches_of_an_endless_stream_cannot_be_overfit(prepared: str) -> None:
    trainer = quiet_trainer(overfit_batches=4, max_steps=8)

    message = r"trainer\.overfit_batches=4 cannot repeat .*: leave it out"
    with pytest.raises(UserError, match=message):
        trainer.fit(Recorder(), TokenShards(prepared))


def fit_with_schedule(
    path: str, schedule: Any, start: Path | None = None, save: Path | None = None, **options: Any
) -> Recorder:
    """Train six steps with a context schedule, or from a checkpoint on; return the record."""
    recorder = Recorder()
    trainer = quiet_trainer(**{"max_steps": 6, "val_check_interval": 3, **options})
    trainer.fit(recorder, TokenShards(path, 4, context_schedule=schedule), ckpt_path=start)
    if save is not None:
        trainer.save_checkpoint(save)
    return recorder


def seen_shapes(recorder: Recorder) -> list[tuple[int, int]]:
    """Return the number and length of the sequences of each batch."""
    return [(len(rows), len(rows[0]) - 1) for rows in recorder.seen]


def seen_targets(recorder: Recorder) -> list[int]:
    targets: list[int] = []
    for rows in recorder.seen:
        for row in rows:
            targets += row[1:]
    return targets


def test_a_context_schedule_cuts_the_same_tokens_into_shorter_sequences(prepared: str) -> None:
    scheduled = fit_with_schedule(prepared, SCHEDULE)

    unscheduled = fit_with_schedule(prepared, None)
    assert seen_shapes(scheduled) == SCHEDULED_SHAPES
    assert scheduled.validated == {LENGTH}
    assert seen_targets(scheduled) == seen_targets(unscheduled)


def test_a_context_schedule_counts_optimizer_steps(prepared: str) -> None:
    recorder = fit_with_schedule(prepared, SCHEDULE, accumulate_grad_batches=2)

    shapes = seen_shapes(recorder)
    assert shapes[::2] == SCHEDULED_SHAPES
    assert shapes[1::2] == SCHEDULED_SHAPES


def test_a_context_schedule_continues_after_a_resume(prepared: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "3.ckpt"

    first = fit_with_schedule(prepared, SCHEDULE, save=checkpoint, max_steps=3)
    second = fit_with_schedule(prepared, SCHEDULE, start=checkpoint)

    assert seen_shapes(first) + seen_shapes(second) == SCHEDULED_SHAPES


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "does not begin at step 0"),
        ({-1: 32, 0: 64}, "does not begin at step 0"),
        ({0: 48, 5: 64}, "has length 48 at step 0, which does not divide the context length 64"),
        ({0: 0, 5: 64}, "has length 0 at step 0"),
        ({0: 64, 5: 32}, "ends with 32 and the context length is 64: end it with 64"),
    ],
)
def test_a_context_schedule_that_does_not_fit_is_refused(
    prepared: str, schedule: dict[int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ready(prepared, context_schedule=schedule)

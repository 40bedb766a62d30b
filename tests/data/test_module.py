"""Reading prepared shards: what is validated on, settings that do not fit. The batches themselves: tests/golden."""

import logging
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

SCHEDULE = {0: 16, 2: 32, 5: LENGTH}
SHAPES = [(16, 16), (16, 16), (8, 32), (8, 32), (8, 32), (4, 64)]


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
    loaders = [ready(prepared, rank, ranks).val_dataloader() for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert (
        {len(each) for each in batches}
        == {len(loader) for loader in loaders}
        == {-(-79 // (4 * ranks))}
    )
    in_order = [batch for step in zip(*batches, strict=True) for batch in step]
    assert counted(in_order) == streams["val"][1:].tolist()
    tokens = torch.cat([batch.tokens.flatten() for batch in in_order])
    assert tokens[:4999].tolist() == streams["val"][:4999].tolist()
    assert not tokens[5000:].any()  # filled up with the end of document, 0


def model(length: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=320, context_length=length, n_layers=1, n_heads=1, d_model=8)


def validate(path: str, length: int = LENGTH, devices: Any = None, **settings: Any) -> float:
    trainer = quiet_trainer(**devices or {})
    return trainer.validate(model(length), TokenShards(path, **settings), verbose=False)[0][
        "val/loss"
    ]


@pytest.mark.parametrize("batch_size", [8, 79])
def test_validation_loss_on_two_devices_is_that_on_one(prepared: str, batch_size: int) -> None:
    """With batches of 79 the second device has nothing to evaluate."""
    alone, devices = validate(prepared), {"devices": 2, "strategy": "ddp"}
    both = on_two_devices(validate, path=prepared, val_batch_size=batch_size, devices=devices)
    assert both == pytest.approx([alone, alone], rel=1e-6)


def test_validation_at_a_longer_context_than_training(prepared: str) -> None:
    assert validate(prepared, 16, val_context_length=256) == pytest.approx(
        validate(prepared, 16), rel=0.1
    )
    data = ready(prepared, context_length=16, val_context_length=256)
    assert next(iter(data.val_dataloader())).tokens.shape == (4, 256)
    assert next(iter(data.train_dataloader())).tokens.shape == (4, 16)


@pytest.mark.parametrize("n", [1, 100, 10_000])
def test_validation_on_the_first_tokens(prepared: str, streams: Any, n: int, caplog) -> None:
    caplog.set_level(logging.INFO, "anlit")
    batches = list(ready(prepared, val_tokens=n).val_dataloader())
    assert counted(batches) == streams["val"][1 : n + 1].tolist()
    assert sum(len(batch.tokens) for batch in batches) == -(-min(n, 4999) // LENGTH)
    assert ("has only 4,999 targets, not the 10,000 of --data.val_tokens" in caplog.text) == (
        n > 4999
    )


@pytest.mark.parametrize("tokens", [None, 1000])
@pytest.mark.parametrize("n", [1, 10, 1_000_000])
def test_validation_on_blocks_spread_over_the_split(
    prepared: str, streams: Any, n: int, tokens: Any, caplog
) -> None:
    """Each is the middle one of as many equal parts of the split as blocks are asked for, whatever the devices."""
    caplog.set_level(logging.INFO, "anlit")
    blocks = np.array_split(
        streams["val"][1 : tokens + 1 if tokens else None], range(LENGTH, tokens or 4999, LENGTH)
    )
    count = min(n, len(blocks))
    expected = [
        blocks[int((number + 0.5) * len(blocks) / count)].tolist() for number in range(count)
    ]
    for devices in (1, 3):
        shares = [
            ready(prepared, rank, devices, val_blocks=n, val_tokens=tokens)
            for rank in range(devices)
        ]
        steps = zip(*(data.val_dataloader() for data in shares), strict=True)
        rows = [
            row[row != IGNORE_INDEX].tolist()
            for step in steps
            for batch in step
            for row in batch.targets
        ]
        assert [row for row in rows if row] == expected
    assert bool(re.search(f"only {len(blocks)} blocks of 64 .* 1,000,000 of", caplog.text)) == (
        n > len(blocks)
    )


@pytest.mark.parametrize(("options", "first"), [
    ({"limit_val_batches": 3}, 3), ({"limit_val_batches": 0.5}, 9), ({"limit_val_batches": 20}, None),
    ({"limit_val_batches": 0}, None), ({"fast_dev_run": 2}, None), ({"num_sanity_val_steps": 2}, None),
], ids=str)  # fmt: skip
def test_a_validation_cut_from_the_beginning_is_said(
    prepared: str, options: Any, first: int | None, caplog
) -> None:
    trainer = quiet_trainer(**{"max_steps": 1, "devices": 1, **options})
    trainer.fit(Recorder(), TokenShards(prepared, 4, val_batch_size=4, val_blocks=75))
    said = f"reads the first {first} of 19 batches, .* set data.val_blocks to {4 * (first or 0)} "
    assert (
        bool(re.search(said, caplog.text))
        == ("limit_val_batches" in caplog.text)
        == (first is not None)
    )


def test_a_test_cut_from_the_beginning_is_said(
    tmp_path: Path, streams: dict[str, np.ndarray], caplog
) -> None:
    write_prepared(tmp_path / "own", {**streams, "test": streams["val"][:700]})
    trainer = quiet_trainer(devices=1, limit_test_batches=1)
    trainer.test(Recorder(), TokenShards(str(tmp_path / "own"), 4, val_batch_size=4), verbose=False)
    assert re.search(
        "limit_test_batches=1 reads the first 1 of .*/test and no sample of it: leave the",
        caplog.text,
    )


def test_a_test_split_where_there_is_one(
    tmp_path: Path, prepared: str, streams: dict[str, np.ndarray]
) -> None:
    own = write_prepared(tmp_path / "own", {**streams, "test": streams["val"][:700]})
    data = ready(str(tmp_path / "own"), val_tokens=64)
    assert counted(data.test_dataloader()) == own["test"][1:].tolist()
    with pytest.raises(UserError, match="has no test split: use `anlit validate`"):
        ready(prepared).test_dataloader()
    data.manifest["test"]["bytes"] = 5 * 700
    assert (
        data.bytes_per_token("test"),
        data.bytes_per_token("val"),
        data.bytes_per_token("train"),
    ) == (5, None, 3)


def test_context_length_and_vocabulary_of_the_model(prepared: str) -> None:
    for size in (320, 384):  # 320 rounded up to a multiple of 128
        own = {"context_length": LENGTH, "vocab_size": size}
        assert ready(prepared, model=own, context_length=None).context_length == LENGTH
    with pytest.raises(
        UserError, match=r"data\.context_length=32 is not model\.context_length=64: leave it out"
    ):
        ready(prepared, model=own, context_length=32)
    for size in (319, 385):
        with pytest.raises(
            UserError, match=rf"vocabulary of {size} tokens .* have 320: set --model.vocab_size 320"
        ):
            ready(prepared, model={"vocab_size": size})
    with pytest.raises(UserError, match=r"set --data\.context_length"):
        TokenShards(prepared).setup()


def test_too_little_to_train_or_to_validate_on(
    tmp_path: Path, prepared: str, streams: dict[str, np.ndarray]
) -> None:
    ready(prepared, context_length=45_999, batch_size=1)
    with pytest.raises(
        UserError, match=r"length 46000 is too long .*train, .*--model.context_length to 45999 "
    ):
        ready(prepared, context_length=46_000, batch_size=1)
    ready(prepared, batch_size=718)
    with pytest.raises(
        UserError, match=r"batch_size 360 on each of 2 .*needs 720 sequences and .*train has 718 "
    ):
        ready(prepared, 0, 2, batch_size=360)
    write_prepared(tmp_path / "own", {**streams, "val": streams["val"][:1]})
    with pytest.raises(UserError, match="val has no token to predict"):
        ready(str(tmp_path / "own"))


def test_batches_of_an_endless_stream_cannot_be_overfit(prepared: str) -> None:
    with pytest.raises(
        UserError, match=r"trainer\.overfit_batches=4 cannot repeat .*: leave it out"
    ):
        quiet_trainer(overfit_batches=4, max_steps=8).fit(Recorder(), TokenShards(prepared))


def test_context_schedule_cuts_the_same_tokens_by_optimizer_steps(
    prepared: str, tmp_path: Path
) -> None:
    def fit(schedule: Any = SCHEDULE, start: Path | None = None, **options: Any) -> Any:
        """Number and length of the sequences of each batch; all targets; lengths in validation."""
        recorder, trainer = (
            Recorder(),
            quiet_trainer(**{"max_steps": 6, "val_check_interval": 3, **options}),
        )
        trainer.fit(recorder, TokenShards(prepared, 4, context_schedule=schedule), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
        targets = [token for rows in recorder.seen for row in rows for token in row[1:]]
        return (
            [(len(rows), len(rows[0]) - 1) for rows in recorder.seen],
            targets,
            recorder.validated,
        )

    shapes, targets, validated = fit()
    assert (shapes, validated) == (SHAPES, {LENGTH})
    assert targets == fit(None)[1]
    assert fit(accumulate_grad_batches=2)[0] == [shape for shape in SHAPES for _ in range(2)]
    assert fit(max_steps=3)[0] + fit(start=tmp_path / "3.ckpt")[0] == SHAPES


@pytest.mark.parametrize(("schedule", "complaint"), [
    ({}, "does not begin at step 0"), ({-1: 32, 0: 64}, "does not begin at step 0"),
    ({0: 48, 5: 64}, "has length 48 at step 0, which does not divide the context length 64"),
    ({0: 0, 5: 64}, "has length 0 at step 0"),
    ({0: 64, 5: 32}, "ends with 32 and the context length is 64: end it with 64"),
])  # fmt: skip
def test_context_schedules_that_do_not_fit(
    prepared: str, schedule: dict[int, int], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ready(prepared, context_schedule=schedule)

"""Reading prepared shards: the stream, and what the module tells about them."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from anlit import GPT
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.targets import IGNORED
from tests.data.devices import on_two_devices
from tests.data.modules import LENGTH, all_blocks, blocks_of, counted, quiet_trainer, ready, with_model, with_trainer
from tests.data.prepared import write_prepared


def test_training_gives_every_block_once_before_any_again(prepared: str, streams: dict[str, np.ndarray]) -> None:
    blocks = all_blocks(streams["train"])
    loader = ready(prepared).train_dataloader()
    assert len(loader) == len(blocks) // 4 == 179
    batches = [*loader, *loader, *loader]
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == batch.document_ids.shape == (4, LENGTH)
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    seen = blocks_of(batches)
    first, second = seen[: len(blocks)], seen[len(blocks) : 2 * len(blocks)]
    assert sorted(first) == sorted(second) == sorted(blocks)
    assert len({str(order) for order in (first, second, blocks)}) == 3


def test_without_shuffling_the_tokens_come_as_they_lie(prepared: str, streams: dict[str, np.ndarray]) -> None:
    targets = counted(ready(prepared, shuffle=False).train_dataloader())
    assert targets == streams["train"][1 : 1 + 179 * 4 * LENGTH].tolist()


def test_reading_draws_no_random_numbers_of_the_model(prepared: str) -> None:
    state = torch.get_rng_state()
    data = ready(prepared, num_workers=1)
    next(iter(data.train_dataloader()))
    list(data.val_dataloader())
    data.teardown("fit")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_counts_every_token_but_the_first_once(
    prepared: str, streams: dict[str, np.ndarray], ranks: int
) -> None:
    loaders = [with_trainer(prepared, rank, ranks).val_dataloader() for rank in range(ranks)]
    batches = [list(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loader) for loader in loaders} == {-(-79 // (4 * ranks))}
    in_order = [batch for step in zip(*batches, strict=True) for batch in step]
    assert counted(in_order) == streams["val"][1:].tolist()
    tokens = torch.cat([batch.tokens.flatten() for batch in in_order])
    assert tokens[:4999].tolist() == streams["val"][:4999].tolist()
    assert not tokens[5000:].any()  # filled up with the end of document, 0


def validate(path: str, val_batch_size: int, **trainer: Any) -> dict[str, float]:
    torch.manual_seed(0)
    model = GPT(vocab_size=320, context_length=LENGTH, n_layers=1, n_heads=1, d_model=8)
    return dict(
        quiet_trainer(**trainer).validate(model, TokenShards(path, val_batch_size=val_batch_size), verbose=False)[0]
    )


@pytest.mark.parametrize("batch_size", [8, 79])
def test_validation_loss_on_two_devices_is_that_on_one(prepared: str, batch_size: int) -> None:
    """With batches of 79 the second device has nothing to evaluate."""
    alone = validate(prepared, 8)
    strategy = DDPStrategy(process_group_backend="gloo")
    both = on_two_devices(validate, path=prepared, val_batch_size=batch_size, devices=2, strategy=strategy)
    for loss in both:
        assert loss["val/loss"] == pytest.approx(alone["val/loss"], rel=1e-6)


@pytest.mark.parametrize("n", [1, 64, 100, 10_000])
def test_validation_on_the_first_tokens(
    prepared: str, streams: dict[str, np.ndarray], n: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "anlit")
    batches = list(ready(prepared, val_tokens=n).val_dataloader())
    assert counted(batches) == streams["val"][1 : n + 1].tolist()
    assert sum(len(batch.tokens) for batch in batches) == -(-min(n, 4999) // LENGTH)
    assert ("has only 4,999 targets, not the 10,000 of --data.val_tokens" in caplog.text) == (n > 4999)


@pytest.mark.parametrize("tokens", [None, 1000])
@pytest.mark.parametrize("n", [1, 10, 1_000_000])
def test_validation_on_blocks_spread_over_the_split(
    prepared: str, streams: dict[str, np.ndarray], n: int, tokens: int | None
) -> None:
    """Each is the middle one of as many equal parts of the split as blocks are asked for, whatever the devices."""
    blocks = np.array_split(streams["val"][1 : tokens + 1 if tokens else None], range(LENGTH, tokens or 4999, LENGTH))
    count = min(n, len(blocks))
    expected = [blocks[int((number + 0.5) * len(blocks) / count)].tolist() for number in range(count)]
    for devices in (1, 3):
        shares = [with_trainer(prepared, rank, devices, val_blocks=n, val_tokens=tokens) for rank in range(devices)]
        steps = zip(*(data.val_dataloader() for data in shares), strict=True)
        rows = [row[row != IGNORED].tolist() for step in steps for batch in step for row in batch.targets]
        assert [row for row in rows if row] == expected


def test_a_test_split_where_there_is_one(tmp_path: Path, prepared: str, streams: dict[str, np.ndarray]) -> None:
    own = write_prepared(tmp_path / "own", {**streams, "test": streams["val"][:700]})
    data = ready(str(tmp_path / "own"), val_tokens=64)
    assert counted(data.test_dataloader()) == own["test"][1:].tolist()
    with pytest.raises(UserError, match="has no test split: use `anlit validate`"):
        ready(prepared).test_dataloader()
    data.manifest["test"]["bytes"] = 5 * 700
    assert (data.bytes_per_token("test"), data.bytes_per_token("val"), data.bytes_per_token("train")) == (5, 3, 3)


def test_what_the_module_tells(prepared: str, tiny_shards: str) -> None:
    data = ready(prepared)
    assert data.vocab_size == 320
    identity = {"corpus", "content_sha256", "tokenizer_sha256", "tokens", "bytes", "train", "val"}
    assert identity <= data.fingerprint.keys()
    with pytest.raises(UserError, match=r"has no tokenizer.json, .*: put the tokenizer's file there"):
        _ = data.tokenizer
    with_one = TokenShards(tiny_shards)
    assert with_one.tokenizer.get_vocab_size() == 320
    assert with_one.tokenizer.encode("<|endoftext|>").ids != [with_one.manifest["end_of_document"]]


def test_validation_at_a_longer_context_than_training(prepared: str) -> None:
    trainer, losses = quiet_trainer(), []
    model = GPT(vocab_size=320, context_length=16, n_layers=1, n_heads=1, d_model=8)
    for length, expected in ((256, 256), (None, 16)):
        data = TokenShards(prepared, val_context_length=length)
        losses.append(trainer.validate(model, data, verbose=False)[0]["val/loss"])
        assert next(iter(data.val_dataloader())).tokens.shape == (8, expected)
        data.setup()
        assert next(iter(data.train_dataloader())).tokens.shape == (8, data.context_length) == (8, 16)
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_context_length_and_vocabulary_of_the_model(prepared: str) -> None:
    assert with_model(prepared).context_length == LENGTH
    with_model(prepared, vocab_size=384)  # 320 rounded up to a multiple of 128
    for size in (319, 385, 50304):
        with pytest.raises(UserError, match=rf"vocabulary of {size} tokens .* have 320: set --model.vocab_size 320"):
            with_model(prepared, vocab_size=size)
    with pytest.raises(UserError, match=r"set --data\.context_length"):
        TokenShards(prepared).setup()


def test_too_little_to_train_or_to_validate_on(tmp_path: Path, prepared: str, streams: dict[str, np.ndarray]) -> None:
    ready(prepared, context_length=45_999, batch_size=1)
    with pytest.raises(UserError, match=r"length 46000 is too long .*train, .*--model.context_length to 45999 "):
        ready(prepared, context_length=46_000, batch_size=1)
    ready(prepared, batch_size=718)
    with pytest.raises(UserError, match=r"batch_size 719 on each of 1 .*needs 719 sequences and .*train has 718 "):
        ready(prepared, batch_size=719)
    with pytest.raises(UserError, match=r"on each of 2 device\(s\) needs 720 sequences"):
        with_trainer(prepared, 0, 2, batch_size=360)
    write_prepared(tmp_path / "own", {**streams, "val": streams["val"][:1]})
    with pytest.raises(UserError, match="val has no token to predict"):
        ready(str(tmp_path / "own"))

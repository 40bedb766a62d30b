"""The DataModule of the needle task: the loss mask, the order, resuming."""

import pytest
import torch

from anlit import TokenShards
from anlit.data.batch import Batch
from anlit.errors import UserError
from anlit.evaluation.needle.data import NeedleInHaystack
from anlit.targets import IGNORED
from tests.data.modules import blocks_of, with_trainer

LENGTH = 160


def ready(path: str, **changes: object) -> NeedleInHaystack:
    data = NeedleInHaystack(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    data.setup()
    return data


def first(data: TokenShards, n: int) -> list[Batch]:
    batches = [batch for batch, _ in zip(data.train_dataloader(), range(n), strict=False)]
    data.teardown("fit")
    return batches


def same(one: list[Batch], two: list[Batch]) -> bool:
    pairs = [(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("split", ["train", "val"])
def test_only_the_answer_is_a_target(tiny_shards: str, split: str) -> None:
    data = ready(tiny_shards)
    decode = data.tokenizer.decode
    lengths = set()
    for batch in first(data, 3) if split == "train" else getattr(data, f"{split}_dataloader")():
        assert batch.tokens.shape == batch.targets.shape == (4, LENGTH)
        assert torch.equal(batch.document_ids, torch.zeros_like(batch.tokens))
        assert batch.cu_seqlens.tolist() == [0, LENGTH, 2 * LENGTH, 3 * LENGTH, 4 * LENGTH]
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            counted = targets != IGNORED
            n = int(counted.sum())
            lengths.add(n)
            assert counted[-n:].all()
            number = decode(targets[counted].tolist())
            text = decode(tokens.tolist())
            assert len(number) == 8
            assert f" number is{number}.\n" in text
            assert decode(tokens[: LENGTH + 1 - n].tolist()).endswith(" number is")
            assert torch.equal(tokens[LENGTH + 1 - n :], targets[-n:-1])
    assert len(lengths) > 1


def test_the_order_depends_on_seed_and_number_alone(tiny_shards: str) -> None:
    alone = first(ready(tiny_shards, batch_size=6), 4)
    assert same(alone, first(ready(tiny_shards, batch_size=6, num_workers=2), 4))
    assert not same(alone, first(ready(tiny_shards, batch_size=6, seed=1), 4))
    rows = [row for batch in alone for row in blocks_of([batch])]
    assert len({tuple(row) for row in rows}) == 24
    assert [row for batch in first(ready(tiny_shards, batch_size=3), 8) for row in blocks_of([batch])] == rows


def test_devices_share_the_samples(tiny_shards: str) -> None:
    alone = blocks_of(first(ready(tiny_shards, batch_size=6), 2))
    ranks = []
    for rank in range(3):
        data = NeedleInHaystack(tiny_shards, batch_size=2, context_length=LENGTH)
        data.trainer = with_trainer(tiny_shards, rank, 3).trainer
        data.setup()
        ranks.append(first(data, 2))
    assert [row for batches in zip(*ranks, strict=True) for row in blocks_of(list(batches))] == alone


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_goes_on_with_the_next_sample(tiny_shards: str, workers: int) -> None:
    whole = first(ready(tiny_shards), 7)
    data = ready(tiny_shards)
    loader = iter(data.train_dataloader())
    before = [next(loader) for _ in range(3)]
    place = data.state_dict()
    again = ready(tiny_shards, num_workers=workers)
    again.load_state_dict(place)
    assert same(before + first(again, 4), whole)


def test_resuming_with_another_task_is_refused(tiny_shards: str) -> None:
    plain = TokenShards(tiny_shards, batch_size=4, context_length=LENGTH)
    plain.setup()
    next(iter(plain.train_dataloader()))
    data = ready(tiny_shards)
    data.load_state_dict(plain.state_dict())
    with pytest.raises(UserError, match="start from the weights alone"):
        data.train_dataloader()


def test_validation_is_the_same_each_time_and_has_whole_batches(tiny_shards: str) -> None:
    data = ready(tiny_shards, val_batch_size=3, val_samples=7)
    loader = data.val_dataloader()
    one, two = list(loader), list(loader)
    assert len(loader) == len(one) == 3
    assert same(one, two)
    assert not set(map(tuple, blocks_of(one))) & set(map(tuple, blocks_of(first(data, 3))))


def test_what_it_tells_about_itself(tiny_shards: str) -> None:
    data = ready(tiny_shards)
    assert data.bytes_per_token("val") is None
    assert data.fingerprint["task"] == "NeedleInHaystack"
    assert data.fingerprint["content_sha256"] == TokenShards(tiny_shards).manifest["content_sha256"]

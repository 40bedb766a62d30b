"""The needle task: what its samples say, two disjoint sets of numbers, the loss mask, the order, resuming, refusals."""

import re
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from anlit import NeedleInHaystack, TokenShards
from anlit.data.batch import Batch
from anlit.data.needle import CITIES, CLOSE, FACTOR, MODULUS, Haystack, draw_pair
from anlit.errors import UserError
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from tests.data.modules import blocks_of, ready
from tests.data.prepared import random_tokens, write_prepared

LENGTH = 160


@pytest.fixture(scope="module")
def haystack(tiny_shards: str) -> Haystack:
    return Haystack(TokenShards(tiny_shards), "train")


def needle_data(path: str, *device: int, **changes: object) -> NeedleInHaystack:
    return ready(path, *device, kind=NeedleInHaystack, **{"context_length": LENGTH, **changes})


def rows(batches: Iterable[Batch], n: int | None = None) -> list[tuple[int, ...]]:
    """The sequences of the first batches."""
    return list(map(tuple, blocks_of(list(islice(batches, n)))))


def test_a_sample_has_the_needle_at_its_depth_and_the_question_at_the_end(
    haystack: Haystack,
) -> None:
    for i in range(40):
        sample = haystack.sample(300, i / 39, np.random.RandomState(i), held_out=i % 2 == 0)
        question = f"\nThe special magic {sample.city} number is {sample.number}"
        text, needle = (
            haystack.tokenizer.decode(sample.tokens.tolist()),
            haystack._encode(f"{question}.\n").tolist(),
        )
        assert text.endswith(question)
        assert text.count("special magic") == 2
        n_text = 301 - len(needle) - len(haystack._encode(question))
        place = round(sample.depth * n_text)
        assert sample.tokens[place : place + len(needle)].tolist() == needle, text
        assert abs(sample.depth - i / 39) <= CLOSE + 1 / n_text
        assert i not in (0, 39) or sample.depth == i / 39


def test_training_and_evaluation_share_no_pair() -> None:
    for held_out in (False, True):
        state = np.random.RandomState(0)
        pairs = [draw_pair(state, held_out) for _ in range(3000)]
        assert {
            (number + FACTOR * CITIES.index(city)) % MODULUS == 0 for city, number in pairs
        } == {held_out}
        assert {city for city, _ in pairs} == set(CITIES)
        assert {number % 10 for _, number in pairs} == set(range(10))
        assert all(1_000_000 <= number <= 9_999_999 for _, number in pairs)


def test_lengths_that_cannot_be(haystack: Haystack) -> None:
    shortest = haystack.shortest
    with pytest.raises(UserError, match=f"{shortest - 1} tokens are too few .* {shortest} or more"):
        haystack.check(shortest - 1)
    samples = [haystack.sample(shortest, 0.5, np.random.RandomState(i), True) for i in range(300)]
    assert {sample.tokens.shape for sample in samples} == {(shortest + 1,)}
    haystack.check(haystack.n_tokens)
    with pytest.raises(
        UserError, match=r"/train has .* tokens, too few for a haystack of 9,000,000"
    ):
        haystack.check(9_000_000)


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path: Path, prepared: str) -> None:
    words = Tokenizer(models.WordLevel({"number": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    content, tokens = words.to_str(), random_tokens(200, 0)
    write_prepared(
        tmp_path,
        {"train": tokens, "val": tokens},
        tokenizer_sha256=sha256(content.encode()).hexdigest(),
    )
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        UserError, match=r"does not reproduce 'The special magic Aarhus number is 1000000\.'"
    ):
        Haystack(TokenShards(str(tmp_path)), "val")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Haystack(TokenShards(prepared), "val")


@pytest.mark.parametrize("split", ["train", "val"])
def test_only_the_answer_is_a_target(tiny_shards: str, split: str) -> None:
    data = needle_data(tiny_shards)
    decode, lengths = data.tokenizer.decode, set()
    for batch in islice(data.train_dataloader() if split == "train" else data.val_dataloader(), 3):
        assert batch.tokens.shape == batch.targets.shape == (4, LENGTH)
        assert batch.cu_seqlens.tolist() == [0, LENGTH, 2 * LENGTH, 3 * LENGTH, 4 * LENGTH]
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            n = int((targets != IGNORE_INDEX).sum())
            lengths.add(n)
            number = decode(targets[-n:].tolist())
            assert re.fullmatch(r" [1-9]\d{6}", number)
            assert f" number is{number}.\n" in decode(tokens.tolist())
            assert decode(tokens[: LENGTH + 1 - n].tolist()).endswith(" number is")
            assert torch.equal(tokens[LENGTH + 1 - n :], targets[-n:-1])
    assert len(lengths) > 1


def test_the_order_depends_on_seed_and_number_alone_and_is_resumed(tiny_shards: str) -> None:
    def samples(*device: int, batch_size: int = 6, **changes: object) -> list[tuple[int, ...]]:
        return rows(
            needle_data(tiny_shards, *device, batch_size=batch_size, **changes).train_dataloader(),
            4,
        )

    alone = samples()
    assert len(set(alone)) == 24
    assert samples(num_workers=2) == alone != samples(seed=1)
    ranks = [samples(rank, 3, batch_size=2) for rank in range(3)]
    assert [
        rank[row] for first in range(0, 8, 2) for rank in ranks for row in (first, first + 1)
    ] == alone
    data, again = (
        needle_data(tiny_shards, batch_size=6),
        needle_data(tiny_shards, batch_size=6, num_workers=2),
    )
    assert rows(data.train_dataloader(), 3) == alone[:18]
    again.load_state_dict(data.state_dict())
    assert rows(again.train_dataloader(), 1) == alone[18:]
    plain = ready(tiny_shards, context_length=LENGTH)
    plain.load_state_dict(data.state_dict())
    with pytest.raises(UserError, match="start from the weights alone"):
        plain.train_dataloader()


def test_validation_is_the_same_each_time_and_has_whole_batches(tiny_shards: str) -> None:
    data = needle_data(tiny_shards, val_batch_size=3, val_samples=7)
    loader = data.val_dataloader()
    assert len(loader) == len(list(loader)) == 3
    assert rows(loader) == rows(loader)
    assert not set(rows(loader)) & set(rows(data.train_dataloader(), 3))
    assert data.bytes_per_token("val") is None  # a loss over answers has no bits per byte
    assert not data.counts_every_target
    assert data.fingerprint["task"] == "NeedleInHaystack"
    assert data.fingerprint["content_sha256"] == TokenShards(tiny_shards).manifest["content_sha256"]

"""The needle task: its samples, disjoint pairs, the loss mask, the order, resuming, refusals."""

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
from anlit.data.needle import (
    BOUNDARY_SHARE,
    CITIES,
    CITY_FACTOR,
    LARGEST_NUMBER,
    PAIR_MODULUS,
    SMALLEST_NUMBER,
    Haystack,
    Sample,
    draw_pair,
)
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


def sequences(batches: Iterable[Batch], n_batches: int | None = None) -> list[tuple[int, ...]]:
    """Return the sequences of the first batches."""
    return [tuple(block) for block in blocks_of(islice(batches, n_batches))]


def draw_sample(haystack: Haystack, seed: int, depth: float) -> Sample:
    random = np.random.RandomState(seed)
    return haystack.sample(300, depth, random, held_out=seed % 2 == 0)


@pytest.mark.parametrize("number", range(40))
def test_a_sample_has_the_needle_at_its_depth_and_the_question_at_the_end(
    number: int, haystack: Haystack
) -> None:
    depth = number / 39

    sample = draw_sample(haystack, number, depth)

    answered_question = f"\nThe special magic {sample.city} number is {sample.number}"
    text = haystack.tokenizer.decode(sample.tokens.tolist())
    assert text.endswith(answered_question)
    assert text.count("special magic") == 2
    needle = haystack._encode(f"{answered_question}.\n")
    n_answered = len(haystack._encode(answered_question))
    n_text = 301 - len(needle) - n_answered
    position = round(sample.depth * n_text)
    tokens_at_depth = sample.tokens[position : position + len(needle)]
    assert tokens_at_depth.tolist() == needle.tolist()
    assert abs(sample.depth - depth) <= BOUNDARY_SHARE + 1 / n_text
    if depth in (0, 1):
        assert sample.depth == depth


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_evaluation_share_no_pair(held_out: bool) -> None:
    random = np.random.RandomState(0)

    pairs = [draw_pair(random, held_out) for _ in range(3000)]

    for city, number in pairs:
        code = number + CITY_FACTOR * CITIES.index(city)
        assert (code % PAIR_MODULUS == 0) == held_out
    cities = {city for city, _ in pairs}
    numbers = {number for _, number in pairs}
    last_digits = {number % 10 for number in numbers}
    assert cities == set(CITIES)
    assert last_digits == set(range(10))
    assert SMALLEST_NUMBER <= min(numbers) <= max(numbers) <= LARGEST_NUMBER


def test_a_length_without_room_for_text_is_refused(haystack: Haystack) -> None:
    shortest = haystack.shortest

    message = f"{shortest - 1} tokens are too few .* {shortest} or more"
    with pytest.raises(UserError, match=message):
        haystack.check(shortest - 1)

    for seed in range(300):
        random = np.random.RandomState(seed)
        sample = haystack.sample(shortest, 0.5, random, held_out=True)
        assert sample.tokens.shape == (shortest + 1,)


def test_a_length_beyond_the_split_is_refused(haystack: Haystack) -> None:
    haystack.check(haystack.n_tokens)

    message = r"/train has .* tokens, too few for a haystack of 9,000,000"
    with pytest.raises(UserError, match=message):
        haystack.check(9_000_000)


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"number": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    content = tokenizer.to_str()
    streams = {"train": random_tokens(200, 0), "val": random_tokens(200, 0)}
    content_hash = sha256(content.encode()).hexdigest()
    write_prepared(tmp_path, streams, tokenizer_sha256=content_hash)
    (tmp_path / "tokenizer.json").write_text(content)

    message = r"does not reproduce 'The special magic Aarhus number is 1000000\.'"
    with pytest.raises(UserError, match=message):
        Haystack(TokenShards(str(tmp_path)), "val")


def test_shards_without_a_tokenizer_are_refused(prepared: str) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Haystack(TokenShards(prepared), "val")


@pytest.mark.parametrize("split", ["train", "val"])
def test_only_the_answer_is_a_target(tiny_shards: str, split: str) -> None:
    data = needle_data(tiny_shards)
    decode = data.tokenizer.decode
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    answer_lengths = set()
    for batch in islice(loader, 3):
        assert batch.tokens.shape == (4, LENGTH)
        assert batch.targets.shape == (4, LENGTH)
        assert batch.cu_seqlens.diff().tolist() == [LENGTH] * 4
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            n_answer = int((targets != IGNORE_INDEX).sum())
            question_end = LENGTH + 1 - n_answer
            answer_tokens = targets[-n_answer:]
            answer = decode(answer_tokens.tolist())
            question = decode(tokens[:question_end].tolist())
            assert re.fullmatch(r" [1-9]\d{6}", answer)
            assert question.endswith(" number is")
            assert f" number is{answer}.\n" in question  # the needle
            assert torch.equal(tokens[question_end:], answer_tokens[:-1])
            answer_lengths.add(n_answer)
    assert len(answer_lengths) > 1


def first_samples(path: str, *device: int, batch_size: int = 6, **changes: object) -> list:
    """Return the samples of the first four training batches."""
    data = needle_data(path, *device, batch_size=batch_size, **changes)
    samples = sequences(data.train_dataloader(), 4)
    data.teardown("fit")  # garbage collection would wait for each worker for five seconds
    return samples


def test_the_samples_depend_only_on_seed_and_number(tiny_shards: str) -> None:
    samples = first_samples(tiny_shards)

    assert len(set(samples)) == 24
    samples_of_workers = first_samples(tiny_shards, num_workers=2)
    samples_of_another_seed = first_samples(tiny_shards, seed=1)
    assert samples_of_workers == samples
    assert samples_of_another_seed != samples


def test_three_devices_share_the_samples_of_one(tiny_shards: str) -> None:
    samples_of_ranks = [first_samples(tiny_shards, rank, 3, batch_size=2) for rank in range(3)]

    samples = []
    for first in range(0, 8, 2):
        for samples_of_rank in samples_of_ranks:
            samples += samples_of_rank[first : first + 2]

    assert samples == first_samples(tiny_shards)


def test_the_samples_continue_after_a_resume(tiny_shards: str) -> None:
    samples = first_samples(tiny_shards)
    data = needle_data(tiny_shards, batch_size=6)
    assert sequences(data.train_dataloader(), 3) == samples[:18]

    resumed_data = needle_data(tiny_shards, batch_size=6, num_workers=2)
    resumed_data.load_state_dict(data.state_dict())

    assert sequences(resumed_data.train_dataloader(), 1) == samples[18:]
    resumed_data.teardown("fit")


def test_plain_training_cannot_continue_the_samples(tiny_shards: str) -> None:
    data = needle_data(tiny_shards)
    next(iter(data.train_dataloader()))

    plain_data = ready(tiny_shards, context_length=LENGTH)
    plain_data.load_state_dict(data.state_dict())

    with pytest.raises(UserError, match="start from the weights alone"):
        plain_data.train_dataloader()


def test_validation_is_the_same_each_time_and_has_whole_batches(tiny_shards: str) -> None:
    data = needle_data(tiny_shards, val_batch_size=3, val_samples=7)
    loader = data.val_dataloader()

    assert len(loader) == 3
    assert len(list(loader)) == 3
    samples = sequences(loader)
    assert sequences(loader) == samples
    training_samples = sequences(data.train_dataloader(), 3)
    assert not set(samples) & set(training_samples)


def test_the_loss_over_answers_has_no_bits_per_byte(tiny_shards: str) -> None:
    data = needle_data(tiny_shards)

    assert data.bytes_per_token("val") is None
    assert not data.counts_every_target


def test_the_fingerprint_names_the_task_and_the_corpus(tiny_shards: str) -> None:
    manifest = TokenShards(tiny_shards).manifest

    fingerprint = needle_data(tiny_shards).fingerprint

    assert fingerprint["task"] == "NeedleInHaystack"
    assert fingerprint["content_sha256"] == manifest["content_sha256"]

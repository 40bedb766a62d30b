"""Samples of the needle task: exact length, depth, what the tokens say, two disjoint sets of numbers, refusals."""

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from anlit import TokenShards
from anlit.data.tokenizer import load_tokenizer
from anlit.errors import UserError
from anlit.evaluation.needle.cities import CITIES
from anlit.evaluation.needle.haystack import CLOSE, FACTOR, MODULUS, Haystack, Sample, draw_pair
from tests.data.prepared import random_tokens, write_prepared

LENGTH = 300


def random(seed: int) -> np.random.RandomState:
    return np.random.RandomState(seed)


@pytest.fixture(scope="module")
def haystack(tiny_shards: str) -> Haystack:
    return Haystack.of(TokenShards(tiny_shards), "train")


@pytest.fixture(scope="module")
def samples(haystack: Haystack) -> list[Sample]:
    return [haystack.sample(LENGTH, i / 39, random(i), held_out=i % 2 == 0) for i in range(40)]


def test_length_is_exact_and_the_answer_comes_last(haystack: Haystack, samples: list[Sample]) -> None:
    for sample in samples:
        assert sample.tokens.shape == (LENGTH + 1,)
        assert haystack.tokenizer.decode(sample.tokens[-sample.n_answer :].tolist()) == f" {sample.number}"
    assert haystack.shortest < LENGTH
    shortest = [haystack.sample(haystack.shortest, 0.5, random(i), True) for i in range(300)]
    assert {sample.tokens.shape for sample in shortest} == {(haystack.shortest + 1,)}


def test_the_text_has_one_needle_and_the_question(haystack: Haystack, samples: list[Sample]) -> None:
    for sample in samples:
        text = haystack.tokenizer.decode(sample.tokens.tolist())
        sentence = f"\nThe special magic {sample.city} number is {sample.number}.\n"
        assert text.count(sentence) == 1
        assert text.endswith(f"\nThe special magic {sample.city} number is {sample.number}")
        assert text.count("special magic") == 2
        assert re.fullmatch(r"[1-9]\d{6}", str(sample.number))


def test_the_needle_stands_where_it_was_asked_for(haystack: Haystack, samples: list[Sample]) -> None:
    for i, sample in enumerate(samples):
        text = haystack.tokenizer.decode(sample.tokens.tolist())
        needle = haystack._encode(f"\nThe special magic {sample.city} number is {sample.number}.\n")
        question = haystack._encode(f"\nThe special magic {sample.city} number is {sample.number}")
        n_text = LENGTH + 1 - len(needle) - len(question)
        place = round(sample.depth * n_text)
        assert sample.tokens[place : place + len(needle)].tolist() == needle.tolist(), text
        assert abs(sample.depth - i / 39) <= CLOSE + 1 / n_text
    assert samples[0].depth == 0
    assert samples[-1].depth == 1


def test_the_needle_goes_to_the_end_of_a_line_or_sentence_nearby(haystack: Haystack) -> None:
    encode = haystack._encode
    lines = np.concatenate([encode("a b c d e f g h i j\n"), encode("k l m n o p q r s t")])
    newline = len(encode("a b c d e f g h i j\n"))
    assert haystack._place(lines, (newline + 1) / len(lines)) == newline
    sentences = np.concatenate([encode("a b c d e f g h i j."), encode(" k l m n o p q r s t")])
    assert haystack._place(sentences, (newline + 1) / len(sentences)) == newline
    dotted = np.concatenate([encode("a b c d e f g h i j."), encode("k l m n o p q r s t u")])
    assert haystack._place(dotted, (newline + 1) / len(dotted)) == newline + 1  # no sentence ends in j.k
    assert haystack._place(lines, 0.75) == round(0.75 * len(lines))  # too far from both


def test_documents_are_joined_by_blank_lines(haystack: Haystack, samples: list[Sample]) -> None:
    assert all(haystack.end_of_document not in sample.tokens for sample in samples)
    store = haystack.stores[0]
    raw = store.read(0, store.n_tokens)
    end = int(np.flatnonzero(raw == haystack.end_of_document)[0])
    blank, count = haystack.blank_line.tolist(), end + 40
    text = haystack._text_from(0, count).tolist()
    after = raw[end + 1 : count].tolist()
    assert text == (raw[:end].tolist() + blank + after)[:count]
    assert haystack.tokenizer.decode(blank) == "\n\n"


def test_a_sample_is_a_function_of_its_random_state(haystack: Haystack) -> None:
    one, again = (haystack.sample(LENGTH, 0.3, random(5), True) for _ in range(2))
    other = haystack.sample(LENGTH, 0.3, random(6), True)
    assert one.tokens.tolist() == again.tokens.tolist()
    assert one.tokens.tolist() != other.tokens.tolist()


def test_training_and_evaluation_share_no_pair() -> None:
    for held_out in (False, True):
        state = random(0)
        pairs = [draw_pair(state, held_out) for _ in range(3000)]
        rests = {(number + FACTOR * CITIES.index(city)) % MODULUS == 0 for city, number in pairs}
        assert rests == {held_out}
        assert {city for city, _ in pairs} == set(CITIES)
        assert {number % 10 for _, number in pairs} == set(range(10))
        assert all(1_000_000 <= number <= 9_999_999 for _, number in pairs)


def test_text_of_several_sources_is_one(tmp_path: Path, tiny_shards: str) -> None:
    tokens = {
        f"{split}/{name}": random_tokens(200, seed) for split in ("train", "val") for seed, name in enumerate("ab")
    }
    write_prepared(tmp_path / "subsets", tokens)
    (tmp_path / "subsets" / "tokenizer.json").write_bytes(Path(tiny_shards, "tokenizer.json").read_bytes())
    haystack = Haystack.of(TokenShards(str(tmp_path / "subsets")), "val")
    assert haystack.n_tokens == 400
    assert haystack._read(150, 120).tolist() == np.concatenate([tokens["val/a"][150:], tokens["val/b"][:70]]).tolist()
    assert haystack._read(0, 400).tolist() == np.concatenate([tokens["val/a"], tokens["val/b"]]).tolist()


def test_lengths_that_cannot_be(haystack: Haystack) -> None:
    with pytest.raises(UserError, match=f"{haystack.shortest - 1} tokens are too few .* {haystack.shortest} or more"):
        haystack.check(haystack.shortest - 1)
    haystack.check(haystack.n_tokens)
    with pytest.raises(UserError, match=r"/train has .* tokens, too few for a haystack of 9,000,000"):
        haystack.check(9_000_000)


def test_a_tokenizer_that_loses_letters_is_refused(tmp_path: Path, tiny_shards: str, prepared: str) -> None:
    words = Tokenizer(models.WordLevel({"number": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    stores = Haystack.of(TokenShards(tiny_shards), "val").stores
    with pytest.raises(UserError, match=r"does not reproduce 'The special magic Aarhus number is 1000000\.'"):
        Haystack(stores, load_tokenizer(tmp_path / "tokenizer.json"), 0, "mine")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Haystack.of(TokenShards(prepared), "val")

"""Which documents are held out, and that it depends on nothing but what the rule says."""

import hashlib

import numpy as np
import pytest

from anlit.data.preparation.splits import ContentFraction, FirstTokens, Folders, HeldOutTexts, Splits, is_held_out
from anlit.errors import UserError

SLIMPAJAMA = Folders({"train/": "train", "validation/": "val", "test/": "test"})


def held_out(texts: list[str], documents: int, seed: int = 42) -> list[str]:
    """The texts that the rule holds out, in their order."""
    rule = HeldOutTexts(documents, seed)
    chosen, _, _ = rule.choose(np.array([rule.hash_of(text) for text in texts], dtype=np.uint64))
    return [texts[number] for number in sorted(chosen)]


def test_the_base_holds_nothing_out() -> None:
    assert Splits().of_file("validation/a") == "train"
    assert Splits().of_text("a", "train") == "train"
    assert not Splits().compares_texts


def test_folders_are_the_corpus_s_own_splits() -> None:
    names = ["train/validation/a", "validation/chunk1/a", "validation/train/a", "test/a", "README"]
    assert [SLIMPAJAMA.of_file(name) for name in names] == ["train", "val", "val", "test", "train"]
    SLIMPAJAMA.check(["train/a", "validation/a"])  # a test split is nothing to insist on


@pytest.mark.parametrize(("names", "missing"), [(["train/a", "test/a"], "validation/"), (["validation/a"], "train/")])
def test_a_missing_folder_is_refused(names: list[str], missing: str) -> None:
    with pytest.raises(UserError, match=f"no file whose name begins with {missing} .*--source"):
        SLIMPAJAMA.check(names)


TEXTS = [f"text {number}" for number in range(1000)]


def test_the_choice_depends_on_texts_and_seed_alone() -> None:
    """Not on their order, nor on what else is there, nor on any library's version: the first names are fixed."""
    chosen = held_out(TEXTS, 17)
    assert len(chosen) == 17
    assert chosen[:3] == ["text 24", "text 77", "text 180"]
    assert set(held_out(TEXTS[::-1], 17)) == set(chosen)
    assert set(chosen) & set(TEXTS[:500]) <= set(held_out(TEXTS[:500], 17))
    assert set(held_out(TEXTS, 17, seed=43)) != set(chosen)
    halves = [sum(text in set(TEXTS[:500]) for text in held_out(TEXTS, 100, seed)) for seed in range(20)]
    assert 900 < sum(halves) < 1100  # 1000 ± 3.3 standard deviations of a fair choice


def test_copies_of_a_held_out_text_are_on_neither_side() -> None:
    rule = HeldOutTexts(17)
    chosen, copies, repeated = rule.choose(np.array([rule.hash_of(text) for text in TEXTS * 3], dtype=np.uint64))
    assert sorted(TEXTS[number] for number in chosen) == sorted(held_out(TEXTS, 17))
    assert sorted(copies) == sorted(number + times for number in chosen for times in (1000, 2000))
    assert repeated == 2000


@pytest.mark.parametrize("documents", [10, 11])
def test_all_cannot_be_held_out(documents: int) -> None:
    with pytest.raises(UserError, match=r"has 10 different documents and .* --val_documents to a smaller number"):
        held_out(TEXTS[:10] * 2, documents)


@pytest.mark.parametrize("documents", [-1, 0])
def test_nothing_cannot_be_held_out(documents: int) -> None:
    with pytest.raises(UserError, match="--val_documents must be at least 1"):
        HeldOutTexts(documents)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UserError, match=f"--seed must be at least 0 and have at most 64 bits, not {seed}"):
        HeldOutTexts(5, seed)


def test_a_content_s_side_is_that_of_its_hash() -> None:
    rule = ContentFraction(0.3)
    texts = [f"text {number}" for number in range(2000)]
    val = {text for text in texts if rule.of_text(text, "train") == "val"}
    assert val == {text for text in texts if is_held_out(hashlib.sha256(text.encode()).hexdigest(), 0.3)}
    assert 520 < len(val) < 680  # 600 ± 4 standard deviations
    assert val < {text for text in texts if ContentFraction(0.4).of_text(text, "train") == "val"}


@pytest.mark.parametrize("fraction", [-0.1, 0.0, 1.0, 2.0])
def test_a_fraction_that_leaves_a_side_empty_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match=r"val_fraction must be between 0 and 1"):
        ContentFraction(fraction)


@pytest.mark.parametrize("tokens", [-1, 0])
def test_no_tokens_cannot_be_held_out(tokens: int) -> None:
    with pytest.raises(UserError, match="--val_tokens must be at least 1"):
        FirstTokens(tokens)


def test_the_rule_is_written_down() -> None:
    assert HeldOutTexts(5, 3).settings() == {"rule": "HeldOutTexts", "documents": 5, "seed": 3}
    assert FirstTokens(7).settings() == {"rule": "FirstTokens", "tokens": 7}
    assert ContentFraction(0.5).settings() == {"rule": "ContentFraction", "fraction": 0.5}
    assert SLIMPAJAMA.settings()["prefixes"]["validation/"] == "val"

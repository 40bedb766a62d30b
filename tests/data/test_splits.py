"""Which documents are held out, and that it depends on nothing but what the rule says."""

import hashlib

import pytest

from anlit.data.preparation.splits import ContentFraction, FirstTokens, Folders, HeldOutDocuments, Splits, is_held_out
from anlit.errors import UserError

SLIMPAJAMA = Folders({"train/": "train", "validation/": "val", "test/": "test"})


def chosen_in_all(counts: list[int], documents: int, seed: int = 42) -> set[int]:
    """The held-out documents, numbered through all files."""
    held_out = HeldOutDocuments(documents, seed).held_out(counts)
    starts = [sum(counts[:file]) for file in range(len(counts))]
    return {start + number for start, numbers in zip(starts, held_out, strict=True) for number in numbers}


def test_the_base_holds_nothing_out() -> None:
    assert Splits().of_file("validation/a") == "train"
    assert Splits().of_text("a", "train") == "train"
    assert Splits().held_out([3, 4]) == [[], []]


def test_folders_are_the_corpus_s_own_splits() -> None:
    names = ["train/validation/a", "validation/chunk1/a", "validation/train/a", "test/a", "README"]
    assert [SLIMPAJAMA.of_file(name) for name in names] == ["train", "val", "val", "test", "train"]
    SLIMPAJAMA.check(["train/a", "validation/a"])  # a test split is nothing to insist on


@pytest.mark.parametrize(("names", "missing"), [(["train/a", "test/a"], "validation/"), (["validation/a"], "train/")])
def test_a_missing_folder_is_refused(names: list[str], missing: str) -> None:
    with pytest.raises(UserError, match=f"no file whose name begins with {missing} .*--source"):
        SLIMPAJAMA.check(names)


@pytest.mark.parametrize("counts", [[100], [0, 30, 1, 0, 69, 0], [1] * 100])
def test_exactly_so_many_documents_are_held_out_however_they_are_spread(counts: list[int]) -> None:
    held_out = HeldOutDocuments(17).held_out(counts)
    assert sum(len(numbers) for numbers in held_out) == 17
    for numbers, count in zip(held_out, counts, strict=True):
        assert numbers == sorted(set(numbers))
        assert all(0 <= number < count for number in numbers)
    assert chosen_in_all(counts, 17) == chosen_in_all([100], 17)


def test_the_choice_is_the_seed_s() -> None:
    choices = [chosen_in_all([400, 600], 50, seed) for seed in (42, 42, 43)]
    assert choices[0] == choices[1] != choices[2]
    halves = [sum(number < 500 for number in chosen_in_all([1000], 100, seed)) for seed in range(20)]
    assert 900 < sum(halves) < 1100  # 1000 ± 3.3 standard deviations of a fair choice


@pytest.mark.parametrize("documents", [-1, 0, 10, 11])
def test_all_or_nothing_cannot_be_held_out(documents: int) -> None:
    with pytest.raises(UserError, match=r"has 10 documents and .* --val-documents to a smaller number"):
        HeldOutDocuments(documents).held_out([4, 6])


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(UserError, match="--seed must be at least 0, not -1"):
        HeldOutDocuments(5, -1)


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
    with pytest.raises(UserError, match="--val-tokens must be at least 1"):
        FirstTokens(tokens)


def test_the_rule_is_written_down() -> None:
    assert HeldOutDocuments(5, 3).settings() == {"rule": "HeldOutDocuments", "documents": 5, "seed": 3}
    assert FirstTokens(7).settings() == {"rule": "FirstTokens", "tokens": 7}
    assert ContentFraction(0.5).settings() == {"rule": "ContentFraction", "fraction": 0.5}
    assert SLIMPAJAMA.settings()["prefixes"]["validation/"] == "val"

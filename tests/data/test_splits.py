"""Which documents are held out, and that it depends on nothing but what the rule says."""

import hashlib

import pytest

from anlit.data.preparation.recipes import Splits
from anlit.data.preparation.sources import SourceFile, is_held_out
from anlit.errors import UserError

SLIMPAJAMA = Splits({"train/": "train", "validation/": "val", "test/": "test"})


def test_folders_are_the_corpus_s_own_splits() -> None:
    names = ["train/validation/a", "validation/chunk1/a", "validation/train/a", "test/a", "README"]
    assert [SLIMPAJAMA.of_file(SourceFile(name, 1)) for name in names] == ["train", "val", "val", "test", "train"]
    SLIMPAJAMA.check(
        [SourceFile(name, 1) for name in ("train/a", "validation/a")]
    )  # a test split is nothing to insist on


@pytest.mark.parametrize(("names", "missing"), [(["train/a", "test/a"], "validation/"), (["validation/a"], "train/")])
def test_a_missing_folder_is_refused(names: list[str], missing: str) -> None:
    with pytest.raises(UserError, match=f"no file whose name begins with {missing} .*--source"):
        SLIMPAJAMA.check([SourceFile(name, 1) for name in names])


def test_a_content_s_side_is_that_of_its_hash() -> None:
    rule = Splits(fraction=0.3)
    texts = [f"text {number}" for number in range(2000)]
    val = {text for text in texts if rule.of_text(text, "train") == "val"}
    assert val == {text for text in texts if is_held_out(hashlib.sha256(text.encode()).hexdigest(), 0.3)}
    assert 520 < len(val) < 680  # 600 ± 4 standard deviations
    assert val < {text for text in texts if Splits(fraction=0.4).of_text(text, "train") == "val"}

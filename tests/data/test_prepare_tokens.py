"""The tokenizer of a preparation, the width of its tokens, and that litdata reads them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from anlit.errors import UserError
from tests.data import layouts
from tests.data.layouts import END_OF_DOCUMENT, documents
from tests.data.preparing import (
    assert_holds,
    make,
    read_stream,
    read_texts,
    recipe_of,
    text_file_source,
    train_tokenizer,
    write_texts,
)


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_the_trained_tokenizer_has_seen_the_training_part_only(tmp_path: Path, kind: str) -> None:
    from anlit.data.tokenizer import train_bpe

    some = list(documents(60, seed=2))[10:]
    if kind == ".txt":
        write_texts(tmp_path / "text", some)
        options = {}
    else:
        options = {"pattern": text_file_source(tmp_path / "text", some, kind), "text_field": "content"}
    make(tmp_path / "out", recipe_of("TextFiles", tmp_path / "text", vocab_size=320, val_fraction=0.2, **options))
    train, val = (read_texts(tmp_path / "out", split) for split in ("train", "val"))
    stored = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).to_str()
    assert train_bpe(train, 320).to_str() == stored
    assert train_bpe(train + val, 320).to_str() != stored


def big_tokenizer(path: Path, vocab_size: int) -> str:
    """A byte-level tokenizer of any size: bytes first, then words that no text has, the end of a document last."""
    content = json.loads(train_tokenizer(path, 257).read_text())
    content["model"]["vocab"] |= {f"<{number}>": number for number in range(256, vocab_size - 1)}
    content["added_tokens"][0]["id"] = vocab_size - 1
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "int32")])
def test_tokens_take_two_bytes_where_they_can(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    some = list(documents(25, seed=5))[10:]
    layouts.openwebtext(tmp_path / "hub", some)
    tokenizer = big_tokenizer(tmp_path / "tokenizer.json", vocab_size)
    manifest = make(tmp_path / "out", recipe_of("OpenWebText", tmp_path / "hub", tokenizer=tokenizer, val_fraction=0.2))
    assert (manifest["dtype"], manifest["vocab_size"]) == (dtype, vocab_size)
    val = read_texts(tmp_path / "out", "val")
    assert_holds(tmp_path / "out", {"val": val, "train": [text for text in some if text not in val]})
    assert read_stream(tmp_path / "out", "train").max() == vocab_size - 1 == manifest["end_of_document"]
    assert read_through_litdata(tmp_path / "out", "train") == read_stream(tmp_path / "out", "train").tolist()


def read_through_litdata(folder: Path, stream: str) -> list[int]:
    """All tokens, through litdata's own dataset: blocks of one token lose nothing."""
    from litdata import StreamingDataset, TokensLoader

    loader = TokensLoader(block_size=1)
    dataset = StreamingDataset(str(folder / stream), item_loader=loader, shuffle=False, drop_last=False)
    return [int(block[0]) for block in dataset]


def test_another_end_of_document(tokenizer: str, tmp_path: Path) -> None:
    other = Tokenizer.from_file(tokenizer)
    other.add_special_tokens(["<eod>"])
    other.save(str(tmp_path / "other.json"))
    layouts.openwebtext(tmp_path / "hub", ["a", "b", "c"], n_files=1)
    options = {"tokenizer": str(tmp_path / "other.json"), "val_fraction": 0.2}
    manifest = make(tmp_path / "out", recipe_of("OpenWebText", tmp_path / "hub", end_of_document="<eod>", **options))
    assert manifest["end_of_document"] == 800
    assert read_stream(tmp_path / "out", "train").tolist().count(800) == 2
    with pytest.raises(UserError, match='has no token "<eos>"'):
        make(tmp_path / "bad", recipe_of("OpenWebText", tmp_path / "hub", end_of_document="<eos>", **options))


def test_a_text_that_is_encoded_to_the_end_of_document(tmp_path: Path) -> None:
    """As where a tokenizer has the same token for unknown words."""
    vocabulary = {word: number for number, word in enumerate([END_OF_DOCUMENT, "one", "two", "<|", "endoftext", "|>"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([END_OF_DOCUMENT])
    words.save(str(tmp_path / "words.json"))
    layouts.openwebtext(tmp_path / "hub", ["one", "two", "one three two", "two one", "two two"], n_files=1)
    recipe = recipe_of("OpenWebText", tmp_path / "hub", tokenizer=str(tmp_path / "words.json"), val_fraction=0.3)
    with pytest.raises(UserError, match=r"row 3: the tokenizer makes the end-of-document token out of its text"):
        make(tmp_path / "out", recipe)
    manifest = make(tmp_path / "out", recipe, skip_bad=True)
    assert (manifest["documents"], manifest["skipped"]["separator"]["count"]) == (4, 1)
    tokens = [token for split in ("train", "val") for token in read_stream(tmp_path / "out", split).tolist()]
    assert tokens.count(0) == 4

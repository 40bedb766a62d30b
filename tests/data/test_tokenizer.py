"""The byte-level BPE: exact round trips, determinism, no hidden special tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.data.tokenizer import (
    encode_documents,
    end_of_document_id,
    load_tokenizer,
    parse_tokenizer,
    train_bpe,
    vocabulary_size,
)
from anlit.errors import UserError

TEXTS = ["the row norm of the row is one\n" * 5, "größe und länge, naïve", "def f(x):\n    return x\n" * 9]


def test_any_text_decodes_to_itself() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    strange = ["", " leading", "\r\n\t\x00\x7f", "日本語 🙂 \ufeffé", "<|endoftext|>", "a<|endoftext|>b", "\u2028"]
    for text, ids in zip(strange, encode_documents(tokenizer, strange, 0, np.uint16), strict=True):
        assert ids[-1] == 0
        assert 0 not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_errors_name_the_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size 256"):
        train_bpe(TEXTS, 256)
    with pytest.raises(UserError, match=r"no tokenizer at .*none\.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    with pytest.raises(UserError, match='no token "</s>"'):
        end_of_document_id(train_bpe(TEXTS, 290), "</s>")


def changed(change: Callable[[dict[str, Any]], Any], vocab_size: int = 300) -> bytes:
    """The content of a tokenizer.json after a change."""
    content = json.loads(train_bpe(TEXTS, vocab_size).to_str())
    change(content)
    return json.dumps(content).encode()


def ordinary(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["special"] = False


def grow(content: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
    content["normalizer"] = {"type": "Sequence", "normalizers": [step] * 12}


def prepend(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "aaaa"}] * 2000}


def grow_decoded(content: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 50}
    content["decoder"] = {"type": "Sequence", "decoders": [step, {"type": "Sequence", "decoders": [step] * 9}]}


def test_an_end_of_document_that_texts_can_name_is_refused() -> None:
    tokenizer = parse_tokenizer(changed(ordinary), "a.json")
    with pytest.raises(UserError, match=r'takes "<\|endoftext\|>" inside of a text .*: set "special": true'):
        end_of_document_id(tokenizer)


@pytest.mark.parametrize("bomb", [grow, prepend, grow_decoded])
def test_a_tokenizer_that_makes_texts_grow_is_refused(bomb: Callable[[dict[str, Any]], Any]) -> None:
    """Encoding "aaa" with it would end the process: its library cannot report that there is no memory."""
    with pytest.raises(UserError, match=r"^a\.json is not used: .* normalisation steps could make a text"):
        parse_tokenizer(changed(bomb), "a.json")


def test_replacing_as_in_published_tokenizers_is_accepted() -> None:
    space = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    content = changed(lambda content: content.update(normalizer={"type": "Sequence", "normalizers": space}))
    assert parse_tokenizer(content, "a.json").encode("a b").ids


def test_padding_of_the_file_is_not_used() -> None:
    fill = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    content = changed(lambda content: content.update(padding={**fill, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}))
    assert len(parse_tokenizer(content, "a.json").encode("the row").ids) < 8


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(10**13)
    with pytest.raises(UserError, match=r"large\.json has 10,000,000,000,000 bytes, and a tokenizer\.json has"):
        load_tokenizer(tmp_path / "large.json")


def test_files_that_are_no_tokenizer() -> None:
    for content in (b"", b"[" * 100_000, b"\xff", b"null", b"[]", b'{"normalizer": {"type": "Replace"}}'):
        with pytest.raises(UserError, match=r"^a\.json is not a tokenizer\.json"):
            parse_tokenizer(content, "a.json")


def long_prefix(content: dict[str, Any]) -> None:
    content["model"]["continuing_subword_prefix"] = "x" * 100


def test_a_file_at_which_the_library_itself_fails() -> None:
    with pytest.raises(UserError, match=r"^a\.json is not a tokenizer\.json that the tokenizers library can read: "):
        parse_tokenizer(changed(long_prefix), "a.json")


def test_a_vocabulary_reaches_to_its_largest_id() -> None:
    def gap(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["zzzz"] = 70_000

    tokenizer = parse_tokenizer(changed(gap), "a.json")
    assert (tokenizer.get_vocab_size(), vocabulary_size(tokenizer)) == (301, 70_001)

    def too_far(content: dict[str, Any]) -> None:
        content["model"]["vocab"]["zzzz"] = 1 << 31

    with pytest.raises(UserError, match="id 2,147,483,648, and shards hold ids below 2,147,483,648"):
        vocabulary_size(parse_tokenizer(changed(too_far), "a.json"))

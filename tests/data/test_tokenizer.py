"""The byte-level BPE: exact round trips, no hidden special tokens, refusals of foreign files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from anlit.data.tokenizer import (
    encode_documents,
    end_of_document_id,
    load_tokenizer,
    parse_tokenizer,
    train_bpe,
    vocabulary_size,
)
from anlit.errors import UserError

TEXTS = [
    "the row norm of the row is one\n" * 5,
    "größe und länge, naïve",
    "def f(x):\n    return x\n" * 9,
]
STRANGE_TEXTS = [
    "",
    " leading",
    "\r\n\t\x00\x7f",
    "日本語 🙂 \ufeffé",
    "<|endoftext|>",
    "a<|endoftext|>b",
    "\u2028",
]


def tokenizer_json(change: Callable[[dict[str, Any]], Any] = dict, **values: Any) -> bytes:
    """Return the content of a tokenizer.json with other values, or changed in place."""
    content = {**json.loads(train_bpe(TEXTS, 300).to_str()), **values}
    change(content)
    return json.dumps(content).encode()


def tokenizer_with_token(token: str, token_id: int) -> Tokenizer:
    """Return a tokenizer with an additional token."""
    content = tokenizer_json(lambda content: content["model"]["vocab"].update({token: token_id}))
    return parse_tokenizer(content, "a.json")


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    """Return a normalizer or decoder with these steps, as a key of a tokenizer.json."""
    return {name: {"type": "Sequence", f"{name}s": [*steps]}}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("text", STRANGE_TEXTS)
def test_any_text_decodes_to_itself(text: str) -> None:
    tokenizer = train_bpe(TEXTS, 300)

    (ids,) = encode_documents(tokenizer, [text], 0, np.uint16)

    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_a_vocabulary_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size 256"):
        train_bpe(TEXTS, 256)


def test_a_missing_token_to_end_documents_is_named() -> None:
    with pytest.raises(UserError, match='no token "</s>"'):
        end_of_document_id(train_bpe(TEXTS, 290), "</s>")


def test_a_token_to_end_documents_has_to_be_special() -> None:
    content = tokenizer_json(lambda content: content["added_tokens"][0].update(special=False))
    tokenizer = parse_tokenizer(content, "a.json")

    message = r'takes "<\|endoftext\|>" inside a text .*: set "special": true'
    with pytest.raises(UserError, match=message):
        end_of_document_id(tokenizer)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with open(path, "wb") as file:
        file.truncate(10**13)

    message = r"large\.json is damaged \(it has more than 268,435,456 bytes\)"
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


def test_a_folder_in_place_of_a_tokenizer_is_not_called_damaged(tmp_path: Path) -> None:
    """The advice for damage is to remove the folder."""
    with pytest.raises(UserError, match=f"^there is no tokenizer at {tmp_path}: give the path"):
        load_tokenizer(tmp_path)


LONGER_STRING = replace({"String": "a"}, "a" * 50)
LONGER_PATTERN = replace({"Regex": "a"}, "a" * 50)
PREPEND = {"type": "Prepend", "prepend": "aaaa"}
BOMBS = [
    sequence("normalizer", *[LONGER_STRING] * 12),
    sequence("normalizer", *[PREPEND] * 2000),
    sequence("decoder", LONGER_PATTERN, sequence("decoder", *[LONGER_PATTERN] * 9)["decoder"]),
]


@pytest.mark.parametrize("pattern", ["a", "ab"])
def test_a_step_may_make_a_text_a_hundred_times_as_long(pattern: str) -> None:
    longest = "x" * 100 * len(pattern)
    content = tokenizer_json(**sequence("normalizer", replace({"String": pattern}, longest)))
    parse_tokenizer(content, "a.json")

    longer = replace({"String": pattern}, longest + "x")
    with pytest.raises(UserError, match="normalisation steps could make a text"):
        parse_tokenizer(tokenizer_json(**sequence("normalizer", longer)), "a.json")


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_that_makes_texts_grow_is_refused(bomb: dict[str, Any]) -> None:
    """Encoding "aaa" would end the process: the library cannot report a lack of memory."""
    message = r"^a\.json is not used, its .* normalisation steps could make a text"
    with pytest.raises(UserError, match=message):
        parse_tokenizer(tokenizer_json(**bomb), "a.json")


def test_replacing_as_in_published_tokenizers_is_accepted() -> None:
    prepend = {"type": "Prepend", "prepend": "▁"}
    content = tokenizer_json(**sequence("normalizer", prepend, replace({"String": " "}, "▁")))

    assert parse_tokenizer(content, "a.json").encode("a b").ids


def test_padding_is_not_used() -> None:
    padding = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    tokenizer = parse_tokenizer(tokenizer_json(padding=padding), "a.json")

    assert len(tokenizer.encode("the row").ids) < 8


def set_long_prefix(content: dict[str, Any]) -> None:
    content["model"]["continuing_subword_prefix"] = "x" * 100


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"\xff",
        b"null",
        b'{"normalizer": {"type": "Replace"}}',
        tokenizer_json(set_long_prefix),  # makes the library itself fail
    ],
    ids=lambda content: str(content[:10]),
)
def test_a_file_that_the_library_cannot_read_is_refused(content: bytes) -> None:
    message = r"^a\.json is not a tokenizer\.json that the tokenizers library can read \("
    with pytest.raises(UserError, match=message):
        parse_tokenizer(content, "a.json")


def test_a_vocabulary_reaches_to_its_largest_id() -> None:
    tokenizer = tokenizer_with_token("zzzz", 70_000)

    assert tokenizer.get_vocab_size() == 301
    assert vocabulary_size(tokenizer) == 70_001


def test_an_id_that_shards_cannot_hold_is_refused() -> None:
    tokenizer = tokenizer_with_token("zzzz", 1 << 31)

    message = "id 2,147,483,648, and shards hold ids below 2,147,483,648"
    with pytest.raises(UserError, match=message):
        vocabulary_size(tokenizer)


def test_an_endless_pattern_is_one_sentence() -> None:
    """The library, in Rust, panics: its error is not an Exception."""
    endless = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    tokenizer = parse_tokenizer(tokenizer_json(pre_tokenizer=endless), "tokenizer.json")

    with pytest.raises(UserError, match=r"the tokenizer fails on a text \(Onig: .*give another"):
        list(encode_documents(tokenizer, ["x" * 5000], 0, np.uint16))

"""The byte-level BPE: exact round trips, determinism, no hidden special tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anlit.data import tokenizer as module
from anlit.data.tokenizer import (
    encode_documents,
    end_of_document_id,
    load_tokenizer,
    parse_tokenizer,
    train_bpe,
)
from anlit.errors import UserError

TEXTS = [
    "the row norm of the row is one\n" * 5,
    "größe und länge, naïve",
    "def f(x):\n    return x\n" * 9,
]


def test_any_text_decodes_to_itself() -> None:
    tokenizer = train_bpe(TEXTS, 300)
    strange = [
        "",
        " leading",
        "\r\n\t\x00\x7f",
        "日本語 🙂 \ufeffé",
        "<|endoftext|>",
        "a<|endoftext|>b",
        "\u2028",
    ]
    for text, ids in zip(strange, encode_documents(tokenizer, strange, 0, np.uint16), strict=True):
        assert ids[-1] == 0
        assert 0 not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def changed(change: Callable[[dict[str, Any]], Any] = dict, **parts: Any) -> bytes:
    """The content of a tokenizer.json with other parts, or changed in place."""
    content = {**json.loads(train_bpe(TEXTS, 300).to_str()), **parts}
    change(content)
    return json.dumps(content).encode()


def test_errors_name_the_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size 256"):
        train_bpe(TEXTS, 256)
    with pytest.raises(UserError, match='no token "</s>"'):
        end_of_document_id(train_bpe(TEXTS, 290), "</s>")
    tokenizer = parse_tokenizer(
        changed(lambda content: content["added_tokens"][0].update(special=False)), "a.json"
    )
    with pytest.raises(
        UserError, match=r'takes "<\|endoftext\|>" inside of a text .*: set "special": true'
    ):
        end_of_document_id(tokenizer)
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(10**13)
    with pytest.raises(
        UserError, match=r"large\.json has 10,000,000,000,000 bytes, and a tokenizer\.json has"
    ):
        load_tokenizer(tmp_path / "large.json")


def sequence(part: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {part: {"type": "Sequence", f"{part}s": [*steps]}}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LONGER = replace({"Regex": "a"}, "a" * 50)
BOMBS = [
    sequence("normalizer", *[replace({"String": "a"}, "a" * 50)] * 12),
    sequence("normalizer", *[{"type": "Prepend", "prepend": "aaaa"}] * 2000),
    sequence("decoder", LONGER, sequence("decoder", *[LONGER] * 9)["decoder"]),
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_that_makes_texts_grow_is_refused(bomb: dict[str, Any]) -> None:
    """Encoding "aaa" with it would end the process: its library cannot report that there is no memory."""
    with pytest.raises(
        UserError, match=r"^a\.json is not used: .* normalisation steps could make a text"
    ):
        parse_tokenizer(changed(**bomb), "a.json")


def test_replacing_as_in_published_tokenizers_is_accepted_and_padding_is_not_used() -> None:
    space = sequence(
        "normalizer", {"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")
    )
    assert parse_tokenizer(changed(**space), "a.json").encode("a b").ids
    fill = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    content = changed(padding={**fill, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"})
    assert len(parse_tokenizer(content, "a.json").encode("the row").ids) < 8


@pytest.mark.parametrize("content", [
    b"", b"{}", b"[" * 100_000, b"\xff", b"null", b'{"normalizer": {"type": "Replace"}}',
    changed(lambda content: content["model"].update(continuing_subword_prefix="x" * 100)),
], ids=lambda content: str(content[:10]))  # fmt: skip
def test_files_that_are_no_tokenizer(content: bytes) -> None:
    """At the last of them the library itself fails."""
    with pytest.raises(
        UserError, match=r"^a\.json is not a tokenizer\.json that the tokenizers library can read: "
    ):
        parse_tokenizer(content, "a.json")


def test_a_vocabulary_reaches_to_its_largest_id() -> None:
    gap = parse_tokenizer(
        changed(lambda content: content["model"]["vocab"].update(zzzz=70_000)), "a.json"
    )
    assert (gap.get_vocab_size(), module.vocabulary_size(gap)) == (301, 70_001)
    too_far = parse_tokenizer(
        changed(lambda content: content["model"]["vocab"].update(zzzz=1 << 31)), "a.json"
    )
    with pytest.raises(
        UserError, match="id 2,147,483,648, and shards hold ids below 2,147,483,648"
    ):
        module.vocabulary_size(too_far)


def test_a_pattern_without_end_is_one_sentence() -> None:
    """The library, in Rust, panics: its error is no Exception."""
    endless = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}  # fmt: skip
    tokenizer = parse_tokenizer(changed(pre_tokenizer=endless), "tokenizer.json")
    with pytest.raises(UserError, match=r"the tokenizer fails on a text \(Onig: .*give another"):
        list(encode_documents(tokenizer, ["x" * 5000], 0, np.uint16))

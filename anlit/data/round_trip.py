"""Whether a text comes back from its tokens: decode(encode(text)) against the text.

A byte-level BPE gives back every text by construction, so its texts are not decoded. With NFC as its
only normalisation (GPT-NeoX, Qwen) it gives back every text in that Unicode normal form. The texts of
all other tokenizers are decoded, which takes a tenth to a half of the time of encoding.
"""

import json
import os
import unicodedata
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from anlit.data.tokenizer import steps_of
from anlit.errors import panics_told

SHOWN = 20  # characters of a text in a sentence
NormalForm = Literal["NFC", "NFD"]
NORMAL_FORMS: tuple[NormalForm, ...] = ("NFC", "NFD")


class Kind(StrEnum):
    """What decode(encode(text)) is, where it is not the text."""

    NORMALISED = "normalised"  # another Unicode normal form, which stands for the same characters
    CHANGED = "changed"  # another text: letters are lost, lower case, other spaces
    LOST = "lost"  # nothing at all


class Change(NamedTuple):
    """How a text differs from what comes back from its tokens."""

    kind: Kind
    text: str
    back: str  # what comes back

    @property
    def place(self) -> str:
        """The first place where they differ, in a clause."""
        start = len(os.path.commonprefix([self.text, self.back]))  # noqa: RUF071  of characters
        shown = [whole[start : start + SHOWN] for whole in (self.text, self.back)]
        # Normal forms look alike.
        text, back = map(ascii if self.kind == Kind.NORMALISED else repr, shown)
        return f"{text} becomes {back}"


class RoundTrip:
    """Compares texts with what comes back from their tokens.

    Attributes:
        decodes: whether texts have to be decoded for that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.to_str())
        self.tokenizer = tokenizer
        steps = [step["type"] for step in steps_of(content["normalizer"])]
        is_known = steps in ([], *([form] for form in NORMAL_FORMS))
        self.normal_form: NormalForm | None = steps[0] if steps and is_known else None
        self.decodes = not (is_known and _is_byte_level(content))

    def changes(
        self, texts: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Iterator[Change | None]:
        """For each text None if it comes back, else how it is changed.

        `tokens` are the texts' tokens without the end-of-document token.
        """
        if not self.decodes:
            yield from map(self._normalised, texts)
            return
        ids = [array.tolist() for array in tokens]
        with panics_told():
            decoded = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        for text, back in zip(texts, decoded, strict=True):
            yield None if text == back else Change(_kind_of(text, back), text, back)

    def _normalised(self, text: str) -> Change | None:
        """How a byte-level tokenizer changes a text."""
        if self.normal_form is None or unicodedata.is_normalized(self.normal_form, text):
            return None
        back = unicodedata.normalize(self.normal_form, text)
        return Change(Kind.NORMALISED, text, back)


def _kind_of(text: str, back: str) -> Kind:
    if not back:
        return Kind.LOST
    is_same = unicodedata.normalize("NFC", text) == unicodedata.normalize("NFC", back)
    return Kind.NORMALISED if is_same else Kind.CHANGED


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits a text, turns all its bytes into letters and knows each of them."""
    model = content["model"]
    if model["type"] != "BPE" or (content["decoder"] or {}).get("type") != "ByteLevel":
        return False
    if any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        return False
    if not model["vocab"].keys() >= {*pre_tokenizers.ByteLevel.alphabet()}:
        return False
    if any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"]):
        return False  # it takes spaces beside it
    *splits, last = steps_of(content["pre_tokenizer"]) or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    keeps_all = [split["type"] in ("Split", "Digits") for split in splits]
    return all(keeps_all) and all(split.get("behavior") != "Removed" for split in splits)

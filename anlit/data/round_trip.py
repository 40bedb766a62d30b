"""Whether a text comes back from its tokens: decode(encode(text)) against the text.

A byte-level BPE gives back every text by construction, so its texts are not decoded. If NFC is its
only normalisation (GPT-NeoX, Qwen), it gives back every text in that Unicode normal form. The texts
of all other tokenizers are decoded, which takes a tenth to a half of the time of encoding.
"""

import json
import unicodedata
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from anlit.data.tokenizer import flatten_steps
from anlit.errors import tokenizer_panics_as_errors

NormalForm = Literal["NFC", "NFD"]
NORMAL_FORMS: tuple[NormalForm, ...] = ("NFC", "NFD")
SPLITTING_STEPS = ("Split", "Digits")
"""Pre-tokenizers that cut a text and keep all of it, except for the behaviour "Removed"."""


class ChangeKind(StrEnum):
    """How decode(encode(text)) differs from the text."""

    NORMALISED = "normalised"  # another Unicode normal form of the same characters
    CHANGED = "changed"  # another text: letters are lost, lower case, other spaces
    LOST = "lost"  # the empty text


class RoundTrip:
    """Compares texts with their decoded tokens.

    Attributes:
        decodes: whether the comparison has to decode tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.to_str())
        self.tokenizer = tokenizer
        steps = [step["type"] for step in flatten_steps(content["normalizer"])]
        normalises_only = len(steps) == 1 and steps[0] in NORMAL_FORMS
        self.normal_form: NormalForm | None = steps[0] if normalises_only else None
        self.decodes = not ((not steps or normalises_only) and _is_byte_level(content))

    def find_changes(
        self, texts: Sequence[str], tokens: Sequence[np.ndarray]
    ) -> Iterator[ChangeKind | None]:
        """Yield how each text changes, or None if it comes back.

        `tokens` has the tokens of each text without the end-of-document token.
        """
        if not self.decodes:
            yield from map(self._normalise, texts)
            return
        ids = [array.tolist() for array in tokens]
        with tokenizer_panics_as_errors():
            decoded_texts = self.tokenizer.decode_batch(ids, skip_special_tokens=False)
        for text, decoded in zip(texts, decoded_texts, strict=True):
            yield None if text == decoded else _change_kind(text, decoded)

    def _normalise(self, text: str) -> ChangeKind | None:
        """Return how a byte-level tokenizer changes a text."""
        if self.normal_form is None or unicodedata.is_normalized(self.normal_form, text):
            return None
        return ChangeKind.NORMALISED


def _change_kind(text: str, decoded: str) -> ChangeKind:
    if not decoded:
        return ChangeKind.LOST
    if unicodedata.normalize("NFC", text) == unicodedata.normalize("NFC", decoded):
        return ChangeKind.NORMALISED
    return ChangeKind.CHANGED


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json splits a text, turns all its bytes into letters and knows each."""
    model = content["model"]
    if model["type"] != "BPE" or (content["decoder"] or {}).get("type") != "ByteLevel":
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if not model["vocab"].keys() >= {*pre_tokenizers.ByteLevel.alphabet()}:
        return False
    if any(token["lstrip"] or token["rstrip"] for token in content["added_tokens"]):
        return False  # such a token takes the spaces beside it
    *splits, last_step = flatten_steps(content["pre_tokenizer"]) or [{}]
    if last_step.get("type") != "ByteLevel" or last_step["add_prefix_space"]:
        return False
    return all(_keeps_all_text(split) for split in splits)


def _keeps_all_text(split: dict[str, Any]) -> bool:
    return split["type"] in SPLITTING_STEPS and split.get("behavior") != "Removed"

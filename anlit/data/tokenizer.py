"""Byte-level BPE with the `tokenizers` library: every text can be encoded and decodes to itself."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.data.storage.manifest import LARGEST_VOCABULARY, read_small_file
from anlit.errors import PANIC, UserError, tokenizer_panics_as_errors

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257
"""The 256 bytes and the end-of-document token."""
MOST_GROWTH = 100
"""How many times as long normalisation may make a text. Llama's makes a character two."""
MOST_STEPS = 1000
"""Normalisation steps that a tokenizer may have."""
MOST_LISTED = 8
"""Special tokens that an error lists."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. The same texts in the same order give the same tokenizer.

    Args:
        texts: the training split only, or the tokenizer would know the text of validation.
        vocab_size: number of tokens with the 256 bytes and the end-of-document token (id 0). A
            small corpus with fewer merges gives a smaller vocabulary.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size {vocab_size} has no room for the 256 bytes and the end-of-document token: "
            f"set it to {SMALLEST_VOCABULARY} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return set_plain_encoding(tokenizer)


def set_plain_encoding(tokenizer: Tokenizer) -> Tokenizer:
    """Make a tokenizer encode a text to the same tokens each time, and nothing else.

    "<|endoftext|>" inside a text is encoded as letters. The library does not keep this switch in
    tokenizer.json, so each load sets it again. Truncation and padding are switched off: a padding
    of 10⁹ tokens takes all memory. BPE dropout is switched off too.
    """
    tokenizer.encode_special_tokens = True
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json. Raise UserError if the file is missing, too large or foreign."""
    if not Path(path).is_file():  # a folder of the user's is not damaged
        raise UserError(f"there is no tokenizer at {path}: give the path of a tokenizer.json")
    return parse_tokenizer(read_small_file(str(path)), str(path))


def parse_tokenizer(content: bytes, origin: str) -> Tokenizer:
    """Return the tokenizer in the content of a tokenizer.json, which anyone may have written.

    Raises UserError, which names the `origin`, if the library cannot read it, or its steps could
    make a text too long for the memory.
    """
    try:
        growth, steps = _growth_and_steps(json.loads(content))
        if growth <= MOST_GROWTH and steps <= MOST_STEPS:
            return set_plain_encoding(Tokenizer.from_buffer(content))
    except BaseException as error:
        # The library raises a bare Exception for a file that it cannot read, or panics.
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise UserError(
            f"{origin} is not a tokenizer.json that the tokenizers library can read ({error}): "
            "take another tokenizer.json"
        ) from error
    raise UserError(
        f"{origin} is not used, its {steps:,} normalisation steps could make a text {growth:,.0f} "
        f"times as long (at most {MOST_GROWTH}, and {MOST_STEPS:,} steps): take another "
        "tokenizer.json"
    )


def _growth_and_steps(content: dict[str, Any]) -> tuple[float, int]:
    """Return how many times longer a tokenizer.json may make a text, and in how many steps.

    A step is an entry of normalizer, pre_tokenizer or decoder with a `type`.
    The library ends the whole process if it runs out of memory, so this check comes first.
    """
    growth = 1.0
    n_steps = 0
    queue: list[Any] = [content.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
    for value in queue:  # the loop appends to it
        if isinstance(value, list):
            queue += value
        elif isinstance(value, dict):
            queue += value.values()
            if "type" in value:
                n_steps += 1
            growth *= _step_growth(value)
    return growth, n_steps


def _step_growth(step: dict[str, Any]) -> float:
    """Return how many times longer a step may make a text."""
    if step.get("type") == "Replace":
        # A regular expression may match a single character.
        replaced = step["pattern"].get("String", " ")
        return max(1.0, len(step["content"]) / max(1, len(replaced)))
    if step.get("type") == "Prepend":
        return 1 + len(step["prepend"])
    return 1.0


def flatten_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre_tokenizer in order, without their Sequences."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    steps = []
    for inner_step in step.get("normalizers") or step.get("pretokenizers") or []:
        steps += flatten_steps(inner_step)
    return steps


def end_of_document_id(tokenizer: Tokenizer, token: str = END_OF_DOCUMENT) -> int:
    """Return the id of the token that ends a document.

    Raises UserError if it is missing, or if a text that spells it is encoded to it.
    """
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise UserError(
            f'the tokenizer has no token "{token}" to end documents with'
            f"{_describe_special_tokens(tokenizer)}: set --end_of_document "
            "(--data.end_of_document) to a token that it has"
        )
    if token_id in tokenizer.encode(token, add_special_tokens=False).ids:
        raise UserError(
            f'the tokenizer takes "{token}" inside a text for the end of a document: set '
            '"special": true for that token in the added_tokens of its tokenizer.json, or choose '
            "another --end_of_document"
        )
    return token_id


def _describe_special_tokens(tokenizer: Tokenizer) -> str:
    """Return a clause with the first special tokens of a tokenizer. Empty if it has none."""
    names = []
    for _, token in sorted(tokenizer.get_added_tokens_decoder().items()):
        if token.special:
            names.append(token.content)
    if not names:
        return ""
    listed = " ".join(names[:MOST_LISTED])
    if len(names) > MOST_LISTED:
        listed += " …"
    return f" (its special tokens: {listed})"


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the size of an embedding for all ids, which may have gaps.

    Raises UserError if it is above 2³¹.
    """
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > LARGEST_VOCABULARY:
        raise UserError(
            f"the tokenizer has a token with the id {size - 1:,}, and shards hold ids below "
            f"{LARGEST_VOCABULARY:,}: number its tokens without gaps"
        )
    return size


def encode_documents(
    tokenizer: Tokenizer, texts: list[str], end_of_document: int, dtype: np.dtype | type
) -> Iterator[np.ndarray]:
    """Yield the tokens of each text and then the end-of-document token, (n + 1,) of `dtype`."""
    with tokenizer_panics_as_errors():
        # Fast: without the positions of characters.
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for encoding in encodings:
        yield np.array([*encoding.ids, end_of_document], dtype=dtype)

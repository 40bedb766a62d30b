"""Byte-level BPE with the `tokenizers` library: every text can be encoded and decodes to itself."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.errors import PANIC, UserError, panics_told

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-document token
LARGEST_VOCABULARY = 1 << 31
LARGEST_FILE = 128 << 20  # of a tokenizer.json; vocabularies of 250,000 tokens take up to 35 MB
MOST_GROWTH, MOST_STEPS = 100, 1000  # Llama's makes a text of one character twice as long
MOST_LISTED = 8  # special tokens in a sentence


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; the same texts in the same order give the same tokenizer.

    Args:
        texts: the training part only, or the validation loss would know its own text.
        vocab_size: number of tokens with the end-of-document token (id 0), with room for the 256 bytes. A corpus too
            small to have so many merges gives fewer.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size {vocab_size} leaves no room for the 256 bytes and the end-of-document token: "
            f"set it to {SMALLEST_VOCABULARY} or more."
        )
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return as_plain_text(tokenizer)


def as_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Encode "<|endoftext|>" inside a text as those letters, which no tokenizer.json says, and neither cut nor fill up.

    Its own truncation and padding are not ours: a padding of 10⁹ tokens takes all memory. BPE dropout is
    switched off, because a text has the same tokens each time.
    """
    tokenizer.encode_special_tokens = True
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json; UserError if there is no such file, or as in `parse_tokenizer`."""
    if not Path(path).is_file():
        raise UserError(f"There is no tokenizer at {path}: give the path of a tokenizer.json.")
    if (size := Path(path).stat().st_size) > LARGEST_FILE:
        raise UserError(
            f"{path} has {size:,} bytes, and a tokenizer.json has {LARGEST_FILE:,} at most: give another."
        )
    return parse_tokenizer(Path(path).read_bytes(), str(path))


def parse_tokenizer(content: bytes, where: str) -> Tokenizer:
    """The tokenizer in a tokenizer.json that lies at `where`, whoever has written it.

    Raises UserError if it is none, or its steps could make a text so long that it takes all memory.
    """
    try:
        growth, steps = _growth_and_steps(json.loads(content))
        if growth <= MOST_GROWTH and steps <= MOST_STEPS:
            return as_plain_text(Tokenizer.from_buffer(content))
    except BaseException as error:  # the library raises bare Exception for whatever it cannot read
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise UserError(
            f"{where} is not a tokenizer.json that the tokenizers library can read: {error}."
        ) from error
    raise UserError(
        f"{where} is not used: its {steps:,} normalisation steps could make a text {growth:,.0f} times as long "
        f"(at most {MOST_GROWTH}, and {MOST_STEPS:,} steps): take another tokenizer.json."
    )


def _growth_and_steps(content: dict[str, Any]) -> tuple[float, int]:
    """How many times longer a text may become by what a tokenizer.json replaces in it, and in how many steps.

    The library ends the whole process if it runs out of memory, so this has to be known before.
    """
    growth, steps = 1.0, 0
    waiting: list[Any] = [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    for part in waiting:  # which grows
        if isinstance(part, dict):
            steps += "type" in part
            if part.get("type") == "Replace":
                replaced = part["pattern"].get(
                    "String", " "
                )  # an expression may stand for one character
                growth *= max(1.0, len(part["content"]) / max(1, len(replaced)))
            elif part.get("type") == "Prepend":
                growth *= 1 + len(part["prepend"])
        waiting += (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        )
    return growth, steps


def has_dropout(content: bytes) -> bool:
    """Whether a tokenizer.json asks for BPE dropout, that is, for other tokens each time."""
    return bool(json.loads(content)["model"].get("dropout"))


def steps_of(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre_tokenizer of a tokenizer.json, in order, without the sequences around them."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [step for one in inner for step in steps_of(one)]


def end_of_document_id(tokenizer: Tokenizer, token: str = END_OF_DOCUMENT) -> int:
    """Id of the token that ends a document; UserError if there is none, or a text that has its letters is cut by it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise UserError(
            f'The tokenizer has no token "{token}" to end documents with{_special_tokens(tokenizer)}: set '
            "--end_of_document (--data.end_of_document) to the one it has."
        )
    if token_id in tokenizer.encode(token, add_special_tokens=False).ids:
        raise UserError(
            f'The tokenizer takes "{token}" inside of a text for the end of a document: set "special": true for '
            "that token in the added_tokens of its tokenizer.json, or choose another --end_of_document."
        )
    return token_id


def _special_tokens(tokenizer: Tokenizer) -> str:
    """The special tokens of a tokenizer in a clause, the first of them if there are many."""
    tokens = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    names = [token.content for token in tokens if token.special]
    more = " …" if len(names) > MOST_LISTED else ""
    return f" (its special tokens: {' '.join(names[:MOST_LISTED])}{more})" if names else ""


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, also if no token has some: what an embedding needs; UserError if above 2³¹."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > LARGEST_VOCABULARY:
        raise UserError(
            f"The tokenizer has a token with the id {size - 1:,}, and shards hold ids below {LARGEST_VOCABULARY:,}: "
            "number its tokens without gaps."
        )
    return size


def encode_documents(
    tokenizer: Tokenizer, texts: list[str], end_of_document: int, dtype: np.dtype | type
) -> Iterator[np.ndarray]:
    """Each text's tokens and then the end-of-document token, (n + 1,) of a dtype that holds all ids."""
    with panics_told():  # fast: without characters' positions
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    for encoding in encodings:
        yield np.array([*encoding.ids, end_of_document], dtype=dtype)

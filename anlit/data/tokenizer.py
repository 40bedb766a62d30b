"""Byte-level BPE with the `tokenizers` library: train, load, encode documents.

Byte level means that every text can be encoded and decodes to itself, whatever it contains.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anlit.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the 256 bytes and the end-of-document token


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; the same texts in the same order give the same tokenizer.

    Args:
        texts: the training part only, or the validation loss would know its own text.
        vocab_size: number of tokens with the end-of-document token (id 0). A corpus too small to
            have so many merges gives fewer.

    Raises:
        UserError: `vocab_size` has no room for the 256 bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab_size {vocab_size} leaves no room for the 256 bytes and the end-of-document token: "
            f"set it to {SMALLEST_VOCABULARY} or more."
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
    return as_plain_text(tokenizer)


def as_plain_text(tokenizer: Tokenizer) -> Tokenizer:
    """Encode "<|endoftext|>" inside a text as those letters: only we place the real token.

    tokenizer.json does not store this setting, so it is set again after every load.
    """
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        UserError: there is no such file, or it is not a tokenizer.
    """
    if not Path(path).is_file():
        raise UserError(f"There is no tokenizer at {path}: give the path of a tokenizer.json.")
    try:
        return as_plain_text(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        raise UserError(f"{path} is not a tokenizer.json that the tokenizers library can read: {error}.") from error


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex; of tokenizer.json it names the tokenizer in checkpoints."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def end_of_document_id(tokenizer: Tokenizer, token: str = END_OF_DOCUMENT) -> int:
    """Id of the token that ends a document.

    Raises:
        UserError: the vocabulary does not have it.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UserError(
            f'The tokenizer has no token "{token}" to end documents with: set --data.end_of_document to the one it has.'
        )
    return found


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    """The smallest type that shards can hold the ids in: two bytes where they suffice."""
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def encode_documents(tokenizer: Tokenizer, texts: list[str], end_of_document: int) -> Iterator[np.ndarray]:
    """Encode each text and end it with the end-of-document token.

    Yields:
        (n + 1,) uint16 or int32, by the size of the vocabulary.
    """
    dtype = token_dtype(tokenizer.get_vocab_size())
    # "fast": without the characters that each token comes from, which nobody asks for here.
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        yield np.array([*encoding.ids, end_of_document], dtype=dtype)

"""What anlit asks a DataModule for, by name. docs/data.md has the table.

Any LightningDataModule trains a model. These functions read the attributes of `TokenShards` and of
users' own classes, which may lack each of them.
"""

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from anlit.config.objects import class_path_of
from anlit.data.checks import check_vocabulary
from anlit.data.module import TokenShards
from anlit.data.storage.manifest import TOKENIZER, read_small_file
from anlit.errors import UserError

TRUNCATION_AND_PADDING = ("truncation", "padding")
"""Parts of a tokenizer that transformers changes at each call, and that no token depends on."""


def name_of(data: Any) -> str:
    """Return the name of a DataModule in messages. Without one, loaders deliver the batches."""
    return "the loader" if data is None else type(data).__name__


def vocab_size_of(data: Any) -> int | None:
    """Return the number of tokens in the vocabulary. None if the data do not tell it."""
    size = getattr(data, "vocab_size", None)
    if size is not None and (type(size) is not int or size < 1):
        raise UserError(f"{name_of(data)}.vocab_size is {size!r:.40}: give a whole number from 1")
    return size


def check_fits_model(data: Any, model: Any, trains: bool) -> None:
    """Compare a user's own data with the model. Raise UserError if the sizes do not fit.

    `TokenShards` checks itself in its `setup`.
    """
    if isinstance(data, TokenShards):
        return
    size = vocab_size_of(data)
    if size is not None:
        check_vocabulary(model.vocab_size, size, f"{name_of(data)} has")
    length = getattr(data, "context_length", None)
    if trains and length is not None and length > model.context_length:
        raise UserError(
            f"{name_of(data)}.context_length={length} is more than "
            f"model.context_length={model.context_length}: set --model.context_length {length}, "
            "or give shorter rows"
        )


def bytes_per_token_of(data: Any, split: str) -> float | None:
    """Return the bytes of text per token of a split. None if the data do not tell them.

    The attribute `bytes_per_token` is a number, or a method that takes the split.
    """
    value = getattr(data, "bytes_per_token", None)
    if callable(value):
        value = value(split)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise UserError(
            f"{name_of(data)}.bytes_per_token is {value!r:.40}: give the bytes of the {split} text "
            "divided by its tokens, more than 0"
        )
    return float(value)


def fingerprint_of(data: Any) -> dict[str, Any] | None:
    """Return the identity of the data in a run's record. None without data.

    For a user's own class it has the class, the sizes, and hashes of `fingerprint` and `tokenizer`.
    """
    if data is None or isinstance(data, TokenShards):
        return data.fingerprint if data is not None else None
    record: dict[str, Any] = {"class": class_path_of(type(data))}
    fingerprint = getattr(data, "fingerprint", None)
    if fingerprint is not None:
        if not isinstance(fingerprint, str) or not fingerprint:
            raise UserError(
                f"{name_of(data)}.fingerprint is {fingerprint!r:.40}: give a text that names the "
                "data and their version, such as a hash"
            )
        record["fingerprint"] = fingerprint
        record["content_sha256"] = sha256(fingerprint.encode()).hexdigest()
    record["vocab_size"] = vocab_size_of(data)
    content = tokenizer_content_of(data)
    record["tokenizer_sha256"] = None if content is None else sha256(content).hexdigest()
    token = getattr(data, "end_of_document", None)
    if token is not None:
        record["end_of_document"] = token
    return record


def tokenizer_content_of(data: Any) -> bytes | None:
    """Return the content of tokenizer.json. None if the data have no tokenizer.

    The attribute `tokenizer` is a tokenizer of the tokenizers library, a fast one of transformers,
    or the path of a tokenizer.json or of its folder.
    """
    if isinstance(data, TokenShards):
        return data.tokenizer_content if data.manifest.get("tokenizer_sha256") else None
    return None if data is None else _tokenizer_content(data)


@lru_cache(maxsize=1)
def _tokenizer_content(data: Any) -> bytes | None:
    """Return the content for a user's own class. Each checkpoint records its hash."""
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None:
        return None
    if isinstance(tokenizer, str | Path):
        return _read_tokenizer(Path(tokenizer), data)
    to_json: Any = getattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "to_str", None)
    if to_json is None:
        raise UserError(
            f"{name_of(data)}.tokenizer is a {type(tokenizer).__name__}: give a tokenizer of the "
            "tokenizers library, a fast one of transformers, or the path of a tokenizer.json"
        )
    content = json.loads(to_json())
    content |= dict.fromkeys(TRUNCATION_AND_PADDING)
    return json.dumps(content, ensure_ascii=False).encode()


def _read_tokenizer(path: Path, data: Any) -> bytes:
    file = path / TOKENIZER if path.is_dir() else path
    try:
        return read_small_file(str(file))
    except OSError as error:
        raise UserError(
            f"{name_of(data)}.tokenizer names {file}, which cannot be read "
            f"({error.strerror or error}): give the path of a tokenizer.json"
        ) from error

"""Reads manifest.json and tokenizer.json of a prepared folder, which anyone may have written.

A path is local, or an address that litdata can read (s3://, gs://, hf://).
"""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anlit.data.storage.remote import download_bytes, is_remote
from anlit.errors import UserError
from anlit.io.read import check_content

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TASKS = "tasks"
"""The folder inside a prepared folder with the plan and the records of the preparation."""
TRAIN = "train"
VAL = "val"
TEST = "test"
SPLITS = (TRAIN, VAL, TEST)
PATH_COMPONENT = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
SMALL_FILE_BYTES = 256 << 20
"""The largest manifest, tokenizer or index. Such an index lists a million chunks."""
MOST_NAME_BYTES = 255
"""The longest file name that common file systems accept."""
LARGEST_VOCABULARY = 1 << 31
CHANGES = "changes"
"""Key of the documents that do not come back from their tokens, counted by `ChangeKind`.

Without the key all documents come back.
"""
TEXT_HASH = "text_sha256"
"""Key of the hash of a split's text in records of tasks and in the manifest.

    text_sha256 = Σ SHA-256(UTF-8 of a document) mod 2²⁵⁶

It depends neither on the tokenizer, nor on the order of the documents (a multiset hash, Clarke et
al. 2003). A mixture has the sum of its folders. It is absent if the text is not known.
"""
MODULUS = 1 << 256

COUNTS_SCHEMA = {"documents": int, "tokens": int}
MANIFEST_SCHEMA = {
    "corpus": str,
    "command": str,
    "dtype": str,
    "document_token_at": str,
    "content_sha256": str,
    "format_version": int,
    "vocab_size": int,
    "end_of_document": int,
    "splits": [str],
    TRAIN: COUNTS_SCHEMA,
    VAL: COUNTS_SCHEMA,
}
VALUE_PATTERNS = {
    "content_sha256": "[0-9a-f]{64}",
    "tokenizer_sha256": "[0-9a-f]{64}|None",
    "dtype": "uint16|int32",  # of tokens, little-endian
    "document_token_at": "end|start",
}
"""Regular expressions for values of the manifest."""


def read_small_file(path: str) -> bytes:
    """Return the content of a small file, local or remote.

    Raises FileNotFoundError, or UserError if the file cannot be read or is too large.
    """
    if is_remote(path):
        return download_bytes(path, SMALL_FILE_BYTES)
    if Path(path).exists() and not Path(path).is_file():
        raise damage_error(path, "it is not a file")
    with Path(path).open("rb") as file:
        content = file.read(SMALL_FILE_BYTES + 1)
    if len(content) > SMALL_FILE_BYTES:
        raise damage_error(path, f"it has more than {SMALL_FILE_BYTES:,} bytes")
    return content


def read_complete_json(path: str, schema: Any) -> Any:
    """Return the content of a small JSON file that has everything in `schema`.

    Raises FileNotFoundError, or UserError if the content does not fit.
    """
    content = read_small_file(path)
    try:
        value = json.loads(content)
        check_content(value, schema, complete=True)
        return value
    except (ValueError, RecursionError) as error:
        raise damage_error(path, str(error)) from error


def read_manifest(path: str) -> dict[str, Any]:
    """Return the manifest of the prepared folder `path`.

    Raises UserError if it is missing, damaged or of another format.
    """
    manifest_path = f"{path}/{MANIFEST}"
    try:
        manifest: dict[str, Any] = read_complete_json(manifest_path, {})
    except (FileNotFoundError, NotADirectoryError) as error:
        if Path(path, TASKS).is_dir():
            raise UserError(
                f"the preparation of {path} is not finished: repeat its command, which continues it"
            ) from error
        raise UserError(
            f"there is no {manifest_path}: set --data.path to a prepared folder, or choose a "
            "corpus that prepares one (--data PythonSources)"
        ) from error
    _refuse_other_version(manifest, manifest_path)
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise damage_error(manifest_path, str(error)) from error
    return manifest


def _refuse_other_version(manifest: dict[str, Any], path: str) -> None:
    """Raise UserError if another version of anlit wrote the folder in another format."""
    version = manifest.get("format_version")
    if version is None or version == FORMAT_VERSION:
        return
    fix = "prepare the data in another folder"
    if not isinstance(version, int) or version > FORMAT_VERSION:
        fix = f"update anlit, or {fix}"
    raise UserError(
        f"{path} was written by another version of anlit (its format_version is {version!r:.40}, "
        f"and this anlit reads {FORMAT_VERSION}): {fix}"
    )


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError for a path, a type or a size that `anlit prepare` never writes."""
    check_content(manifest, MANIFEST_SCHEMA, complete=True)
    for key, pattern in VALUE_PATTERNS.items():
        value = manifest.get(key, "")
        if not re.fullmatch(pattern, str(value)):
            raise ValueError(f"{key} is {value!r:.80}")
    end_of_document = manifest["end_of_document"]
    vocab_size = manifest["vocab_size"]
    if not 0 <= end_of_document < vocab_size <= LARGEST_VOCABULARY:
        raise ValueError(f"end_of_document is {end_of_document} and vocab_size is {vocab_size}")
    for split in manifest["splits"]:
        if split not in SPLITS:
            raise ValueError(f"splits is {manifest['splits']!r:.80}")
        check_content(manifest, {split: COUNTS_SCHEMA}, complete=True)
        # "bytes" is null where tokens came without text.
        counts = manifest[split]
        check_content(counts, {"bytes": int, "subsets": {}, CHANGES: {str: int}, TEXT_HASH: str})
        if not re.fullmatch("[0-9a-f]{64}|None", str(counts.get(TEXT_HASH))):
            raise ValueError(f"{split}.{TEXT_HASH} is {counts[TEXT_HASH]!r:.80}")
        for name, subset_counts in (counts.get("subsets") or {}).items():
            subset = checked_path(name, split, max_depth=1)
            check_content(subset_counts, COUNTS_SCHEMA, subset, complete=True)


def n_changed_documents(manifest: dict[str, Any], split: str) -> int:
    """Return how many documents of a split come back from their tokens as another text."""
    return (manifest[split].get(CHANGES) or {}).get("changed", 0)


def checked_path(name: Any, origin: str, max_depth: int | None = None) -> str:
    """Return a foreign name, such as "data/train-0.parquet", if its path stays inside its folder.

    Raises UserError, which names its `origin`, if the name is not text or absolute, or has more
    than `max_depth` components. No component may be empty, "." or "..", or longer than 255 bytes.
    Backslashes, control characters and lone surrogates are refused too.
    """
    components = name.split("/") if isinstance(name, str) else [""]
    is_inside = all(_is_path_component(component) for component in components)
    if not is_inside or (max_depth is not None and len(components) > max_depth):
        raise UserError(
            f"{origin} names a file {name!r:.80}, which is not inside its folder: "
            "take the data from elsewhere"
        )
    return str(name)


def _is_path_component(text: str) -> bool:
    return bool(PATH_COMPONENT.fullmatch(text)) and len(text.encode()) <= MOST_NAME_BYTES


def read_tokenizer(path: str, manifest: dict[str, Any]) -> bytes:
    """Return the content of a folder's tokenizer.json.

    Raises UserError if it is missing, or is not the tokenizer that made the tokens.
    """
    try:
        content = read_small_file(f"{path}/{TOKENIZER}")
    except FileNotFoundError as error:
        raise UserError(
            f"{path} has no {TOKENIZER}, so its tokens cannot be turned into text: "
            "put the tokenizer's file there under that name"
        ) from error
    expected = manifest["tokenizer_sha256"]
    actual = hashlib.sha256(content).hexdigest()
    if expected is not None and expected != actual:
        raise UserError(
            f"{path}/{TOKENIZER} is not the tokenizer that made the tokens (its SHA-256 begins "
            f"with {actual[:12]}, and {MANIFEST} has {expected[:12]}): put the right file there"
        )
    return content


def damage_error(path: str, problem: str) -> UserError:
    """Return the error for a file that differs from the manifest or the index."""
    return UserError(
        f"{path} is damaged ({problem}): copy the folder again, or remove it and prepare it again"
    )


def hash_text(text: str) -> int:
    """Return the number that a document adds to the hash of its split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def as_hex(total: int) -> str:
    """Return a sum of documents as the manifest has it."""
    return f"{total % MODULUS:064x}"


def add_text_hashes(hashes: Iterable[str | None]) -> str | None:
    """Return the hash of several parts together. None if the text of a part is not known."""
    total = 0
    for text_hash in hashes:
        if text_hash is None:
            return None
        total += int(text_hash, 16)
    return as_hex(total)

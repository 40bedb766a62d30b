"""Reads manifest.json and tokenizer.json of a prepared folder, which anyone may have written.

A path is local, or an address that litdata can read (s3://, gs://, hf://).
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from anlit.data.storage.remote import SMALL_FILE_BYTES, download_bytes, is_remote
from anlit.data.storage.text_hash import TEXT_HASH
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
MOST_NAME_BYTES = 255
"""The longest file name that common file systems accept."""
ANLIT_COMMAND = re.compile(r"anlit( ([\w@%+=:,./-]+|'[^']*'))+", re.ASCII)
"""A command that is safe to copy into a shell: it runs these words and nothing else."""
LARGEST_VOCABULARY = 1 << 31
CHANGES = "changes"
"""Key of the documents that do not come back from their tokens, counted by `ChangeKind`.

Without the key all documents come back.
"""

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
    "format_version": str(FORMAT_VERSION),
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
        return download_bytes(path)
    if Path(path).exists() and not Path(path).is_file():
        raise damage_error(path, "it is not a file")
    with Path(path).open("rb") as file:
        content = file.read(SMALL_FILE_BYTES + 1)
    if len(content) > SMALL_FILE_BYTES:
        raise damage_error(path, f"it has more than {SMALL_FILE_BYTES:,} bytes")
    return content


def read_complete_json(path: str, schema: Any, command: str = "") -> Any:
    """Return the content of a small JSON file that has everything in `schema`.

    Raises FileNotFoundError, or UserError if the content does not fit. `command` makes the folder.
    """
    content = read_small_file(path)
    try:
        value = json.loads(content)
        check_content(value, schema, complete=True)
        return value
    except (ValueError, RecursionError) as error:
        raise damage_error(path, str(error), command) from error


def read_manifest(path: str) -> dict[str, Any]:
    """Return the manifest of the prepared folder `path`.

    Raises UserError if it is missing, damaged or of another format.
    """
    manifest_path = f"{path}/{MANIFEST}"
    is_local = not is_remote(path)
    if is_local and not Path(path).is_dir():
        raise UserError(
            f"there is no folder {path} with token shards: set --data.path to a prepared folder, "
            "or choose a corpus that prepares one (--data PythonSources)"
        )
    try:
        manifest: dict[str, Any] = read_complete_json(manifest_path, {})
    except FileNotFoundError as error:
        if is_local and Path(path, TASKS).is_dir():
            raise UserError(
                f"the preparation of {path} is not finished: repeat its command, which continues it"
            ) from error
        raise UserError(
            f"there is no {manifest_path}, so it is not a prepared folder: set --data.path to "
            "a prepared folder, or to a new name if a corpus is to be prepared there"
        ) from error
    version = manifest.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"{path} has shards of format {version} and this version reads {FORMAT_VERSION}: "
            "remove the folder and prepare it again"
        )
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise damage_error(manifest_path, str(error)) from error
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError for a path, a type or a size that `anlit prepare` never writes."""
    check_content(manifest, MANIFEST_SCHEMA, complete=True)
    wrong_keys = []
    for key, pattern in VALUE_PATTERNS.items():
        if not re.fullmatch(pattern, str(manifest.get(key, ""))):
            wrong_keys.append(key)
    vocab_size = manifest["vocab_size"]
    has_valid_end = 0 <= manifest["end_of_document"] < vocab_size <= LARGEST_VOCABULARY
    if not wrong_keys and not (has_valid_end and set(SPLITS).issuperset(manifest["splits"])):
        wrong_keys = ["end_of_document", "vocab_size", "splits"]
    if wrong_keys:
        faults = []
        for key in wrong_keys:
            faults.append(f"{key} is {manifest.get(key)!r:.80}")
        raise ValueError(", ".join(faults))
    for split in manifest["splits"]:
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


def damage_error(path: str, problem: str, command: str = "") -> UserError:
    """Return the error for a file that differs from the manifest or the index.

    Anyone may have written the manifest's `command`. The message shows only an anlit command.
    """
    is_anlit_command = ANLIT_COMMAND.fullmatch(command) and command.isprintable()
    remake = f"with `{command}`" if is_anlit_command else "by preparing it again"
    return UserError(
        f"{path} is damaged ({problem}): copy the folder again, or remove it and remake it {remake}"
    )

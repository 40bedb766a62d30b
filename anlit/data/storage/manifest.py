"""manifest.json and tokenizer.json of a prepared folder, read as someone else may have written them.

Paths are local or an address that litdata fetches from (s3://, gs://, hf://).
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from anlit.data.storage.remote import SMALL_FILE_BYTES, fetch_bytes, is_remote
from anlit.errors import UserError
from anlit.io.read import check

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TASKS = "tasks"  # the folder of a preparation's plan and of its tasks' records
SPLITS = TRAIN, VAL, TEST = "train", "val", "test"
PATH_PART = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
OWN_COMMAND = re.compile(
    r"anlit( ([\w@%+=:,./-]+|'[^']*'))+", re.ASCII
)  # a shell runs these words and nothing else
COUNTS = {"documents": int, "tokens": int}
CHANGES = "changes"
"""How many documents do not come back from their tokens, by the kinds of `round_trip.Kind`; absent: all do."""
SCHEMA = {
    **dict.fromkeys(("corpus", "command", "dtype", "document_token_at", "content_sha256"), str),
    **dict.fromkeys(("format_version", "vocab_size", "end_of_document"), int),
    **{"splits": [str], TRAIN: COUNTS, VAL: COUNTS},
}
VALUES = {
    "format_version": str(FORMAT_VERSION),
    "content_sha256": "[0-9a-f]{64}",
    "tokenizer_sha256": "[0-9a-f]{64}|None",
    "dtype": "uint16|int32",  # of tokens, little-endian
    "document_token_at": "end|start",
}
"""Regular expressions of some of them."""


def read_bytes(path: str) -> bytes:
    """A small file of a prepared folder, local or remote; FileNotFoundError or UserError where it cannot be read."""
    if is_remote(path):
        return fetch_bytes(path)
    if Path(path).exists() and not Path(path).is_file():
        raise damaged(path, "it is no file")
    with Path(path).open("rb") as file:
        content = file.read(SMALL_FILE_BYTES + 1)
    if len(content) > SMALL_FILE_BYTES:
        raise damaged(path, f"it has more than {SMALL_FILE_BYTES:,} bytes")
    return content


def read_json(path: str, schema: Any, command: str = "") -> Any:
    """The same of a JSON file; UserError also where its content is none, or not all that `schema` says."""
    content = read_bytes(path)
    try:
        value = json.loads(content)
        check(value, schema, complete=True)
        return value
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error), command) from error


def read_manifest(path: str) -> dict[str, Any]:
    """Manifest of the prepared folder `path`; UserError if there is none, or it is damaged or of another format."""
    where, is_local = f"{path}/{MANIFEST}", not is_remote(path)
    if is_local and not Path(path).is_dir():
        raise UserError(
            f"There is no folder {path} with token shards: set --data.path to a prepared folder, "
            "or choose a corpus that prepares one (--data PythonSources)."
        )
    try:
        manifest: dict[str, Any] = read_json(where, {})
    except FileNotFoundError as error:
        if is_local and Path(path, TASKS).is_dir():
            said = f"The preparation of {path} is not finished: repeat the command that began it, which goes on there."
            raise UserError(said) from error
        raise UserError(
            f"There is no {where}, so it is not a prepared folder: set --data.path to one that is, or to a new name if "
            "a corpus is to be prepared there."
        ) from error
    version = manifest.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"{path} has shards of format {version} and this version reads {FORMAT_VERSION}: "
            "remove the folder and prepare it again."
        )
    try:
        _check_manifest(manifest)
    except ValueError as error:
        raise damaged(where, str(error)) from error
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValueError for a path, a type or a size that cannot be what `anlit prepare` writes."""
    check(manifest, SCHEMA, complete=True)
    wrong = [
        key
        for key, pattern in VALUES.items()
        if not re.fullmatch(pattern, str(manifest.get(key, "")))
    ]
    size, end = manifest["vocab_size"], manifest["end_of_document"]
    if wrong or not 0 <= end < size <= 1 << 31 or not {*manifest["splits"]} <= {*SPLITS}:
        names = wrong or ["end_of_document", "vocab_size", "splits"]
        raise ValueError(", ".join(f"{name} is {manifest.get(name)!r:.80}" for name in names))
    for split in manifest["splits"]:
        check(manifest, {split: COUNTS}, complete=True)
        check(
            manifest[split], {"bytes": int, "subsets": {}, CHANGES: {str: int}}
        )  # null where tokens came without text
        for name, counts in (manifest[split].get("subsets") or {}).items():
            check(counts, COUNTS, checked_path(name, split, most_parts=1), complete=True)


def n_changed(manifest: dict[str, Any], split: str) -> int:
    """How many documents of a split come back from their tokens as another text."""
    return (manifest[split].get(CHANGES) or {}).get("changed", 0)


def checked_path(name: Any, where: str, most_parts: int | None = None) -> str:
    """A foreign name that becomes a path, such as "data/train-0.parquet": it stays inside its folder.

    UserError, which names `where` it stands, if it is no text or absolute, has more than `most_parts`, or one that is
    empty, "." or "..", has more than 255 bytes, a backslash, a control character or what no file system can write.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    is_inside = all(PATH_PART.fullmatch(part) and len(part.encode()) <= 255 for part in parts)
    if not is_inside or (most_parts is not None and len(parts) > most_parts):
        raise UserError(
            f"{where} names a file {name!r:.80}, which is not inside its folder: take the data from elsewhere."
        )
    return str(name)


def read_tokenizer(path: str, manifest: dict[str, Any]) -> bytes:
    """The content of a folder's tokenizer.json; UserError if there is none, or not the one that made the tokens."""
    try:
        content = read_bytes(f"{path}/{TOKENIZER}")
    except FileNotFoundError as error:
        said = "so its tokens cannot be turned into text: put the tokenizer's file there under that name"
        raise UserError(f"{path} has no {TOKENIZER}, {said}.") from error
    then, now = manifest["tokenizer_sha256"], hashlib.sha256(content).hexdigest()
    if then is not None and then != now:
        raise UserError(
            f"{path}/{TOKENIZER} is not the tokenizer that made the tokens (its SHA-256 begins with {now[:12]}, and "
            f"{MANIFEST} has {then[:12]}): put that one back."
        )
    return content


def damaged(what: str, how: str, command: str = "") -> UserError:
    """The error for a file that is not what the manifest or the index says.

    Anyone may have written the manifest's `command`: only one that is nothing but an anlit command is shown.
    """
    is_ours = OWN_COMMAND.fullmatch(command) and command.isprintable()
    remake = f"with `{command}`" if is_ours else "by preparing it again"
    return UserError(
        f"{what} is damaged ({how}): copy the folder again, or remove it and remake it {remake}."
    )

"""The manifest and the tokenizer of a prepared folder, read as someone else may have written them.

    DIR/manifest.json     what the folder holds, and the command that makes it
    DIR/tokenizer.json    absent where the tokens came without one

Paths are local or an address that litdata fetches from (s3://, gs://, hf://).
"""

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from anlit.data.storage.remote import SMALL_FILE_BYTES, fetch_bytes, is_remote
from anlit.errors import UserError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TASKS = "tasks"  # the folder of a preparation's plan and of its tasks' records
SPLITS = TRAIN, VAL, TEST = "train", "val", "test"
DTYPES = ("uint16", "int32")  # of tokens, little-endian
SHA256 = re.compile(r"[0-9a-f]{64}")
PATH_PART = re.compile(r"(?!\.{1,2}\Z)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+")
REQUIRED = (
    *("format_version", "corpus", "command", "splits", "train", "val", "vocab_size", "dtype", "end_of_document"),
    *("document_token_at", "tokenizer_sha256", "content_sha256"),
)


def read_bytes(path: str) -> bytes:
    """A small file of a prepared folder, local or remote.

    Raises:
        FileNotFoundError: there is none.
        UserError: the place cannot be reached, or it is no file, or too large to be one of these.
    """
    if is_remote(path):
        return fetch_bytes(path)
    if Path(path).exists() and not Path(path).is_file():
        raise damaged(path, "it is no file")
    with Path(path).open("rb") as file:
        content = file.read(SMALL_FILE_BYTES + 1)
    if len(content) > SMALL_FILE_BYTES:
        raise damaged(path, f"it has more than {SMALL_FILE_BYTES:,} bytes")
    return content


def read_json(path: str, command: str = "") -> Any:
    """The same of a JSON file; UserError also where its content is none. `command` is for `damaged`."""
    try:
        return json.loads(read_bytes(path))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path, str(error), command) from error


def read_manifest(path: str) -> dict[str, Any]:
    """Manifest of the prepared folder `path`; UserError if there is none, or it is damaged or of another format."""
    where = f"{path}/{MANIFEST}"
    if not is_remote(path) and not Path(path).is_dir():
        raise UserError(
            f"There is no folder {path} with token shards: set --data.path to a prepared folder, "
            "or choose a corpus that prepares one (--data PythonSources)."
        )
    try:
        manifest = read_json(where)
    except FileNotFoundError as error:
        raise UserError(_without_manifest(path)) from error
    manifest = manifest if isinstance(manifest, dict) else {}
    version = manifest.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"{path} has shards of format {version} and this version reads {FORMAT_VERSION}: "
            "remove the folder and prepare it again."
        )
    if missing := [key for key in REQUIRED if key not in manifest]:
        raise damaged(where, f"without {', '.join(missing)}")
    _check_manifest(manifest, where)
    return manifest


def _check_manifest(manifest: dict[str, Any], where: str) -> None:
    """Raise UserError for a path, a type or a size that cannot be what `anlit prepare` writes."""
    size, end, tokenizer = manifest["vocab_size"], manifest["end_of_document"], manifest["tokenizer_sha256"]
    splits = manifest["splits"]
    checks = {
        "content_sha256": SHA256.fullmatch(str(manifest["content_sha256"])),
        "tokenizer_sha256": tokenizer is None or SHA256.fullmatch(str(tokenizer)),
        "splits": isinstance(splits, list) and all(split in SPLITS and split in manifest for split in splits),
        "dtype": manifest["dtype"] in DTYPES,
        "vocab_size": type(size) is int and 0 < size <= 1 << 31,
        "end_of_document": type(size) is type(end) is int and 0 <= end < size,
        "document_token_at": manifest["document_token_at"] in ("end", "start"),
        "command": isinstance(manifest["command"], str),
    }
    for split in splits if checks["splits"] else ():
        parts = (manifest[split].get("subsets") or {}) if isinstance(manifest[split], dict) else {}
        checks[split] = isinstance(parts, dict) and all(map(_is_count, [manifest[split], *parts.values()]))
        for name in parts:
            checked_path(name, where, most_parts=1)
    if wrong := [key for key, is_right in checks.items() if not is_right]:
        raise damaged(where, f"{wrong[0]} is {manifest[wrong[0]]!r:.80}")


def _is_count(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    counts = part | {"bytes": part.get("bytes") or 0}  # null where tokens came without text
    return all(type(counts.get(key)) is int and counts[key] >= 0 for key in ("documents", "tokens", "bytes"))


def checked_path(name: Any, where: str, most_parts: int | None = None) -> str:
    """A foreign name that becomes a path, such as "data/train-0.parquet": it stays inside its folder.

    Args:
        where: the file or listing that it stands in, for the error.
        most_parts: folders and the file; 1 for a name alone.

    Raises:
        UserError: it is no text or absolute, or a part of it is empty, "." or "..", has more than 255 bytes, or a
            backslash, a control character or what no file system can write.
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
        raise UserError(
            f"{path} has no {TOKENIZER}, so its tokens cannot be turned into text: put the tokenizer's file there "
            "under that name."
        ) from error
    then, now = manifest["tokenizer_sha256"], hashlib.sha256(content).hexdigest()
    if then is not None and then != now:
        raise UserError(
            f"{path}/{TOKENIZER} is not the tokenizer that made the tokens (its SHA-256 begins with {now[:12]}, and "
            f"{MANIFEST} has {then[:12]}): put that one back."
        )
    return content


def _without_manifest(path: str) -> str:
    if is_remote(path):
        return f"There is no {path}/{MANIFEST}: set --data.path to the address of a prepared folder."
    if Path(path, TASKS).is_dir():
        return f"The preparation of {path} is not finished: repeat the command that began it, which goes on there."
    return (
        f"{path} is not a prepared folder, it has no {MANIFEST}: set --data.path to one that is, "
        "or to a new name if a corpus is to be prepared there."
    )


def damaged(what: str, how: str, command: str = "") -> UserError:
    """The error for a file that is not what the manifest or the index says.

    Args:
        command: the manifest's, which anyone may have written: only one that is nothing but an anlit command is shown.
    """
    try:
        is_plain = shlex.join(shlex.split(command)) == command  # a shell would run these words and nothing else
    except ValueError:  # a quotation that does not end
        is_plain = False
    is_ours = is_plain and command.isprintable() and command.startswith("anlit ")
    remake = f"with `{command}`" if is_ours else "by preparing it again"
    return UserError(f"{what} is damaged ({how}): copy the folder again, or remove it and remake it {remake}.")

"""A prepared folder as a reader sees it: its manifest and the lengths of its chunks.

Paths are local or anything litdata streams (s3://, gs://, ...); remote ones go through fsspec.
"""

import json
from pathlib import Path
from typing import Any

import fsspec

from anlit.errors import UserError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
REQUIRED = (
    "format_version",
    "corpus",
    "vocab_size",
    "end_of_document",
    "tokenizer_sha256",
    "content_sha256",
    *SPLITS,
)


def is_remote(path: str) -> bool:
    return "://" in path


def read_text(path: str) -> str:
    """Text of a local or remote file.

    Raises:
        FileNotFoundError: there is none.
        UserError: the package for this kind of address is missing.
    """
    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    except ImportError as error:
        raise UserError(f"Reading {path} needs another package: {error}.") from error


def read_manifest(path: str) -> dict[str, Any]:
    """Manifest of the prepared folder `path`.

    Raises:
        UserError: no folder, not a prepared one, a damaged manifest or one of another format.
    """
    if not is_remote(path) and not Path(path).is_dir():
        raise UserError(
            f"There is no folder {path} with token shards: set --data.path to a prepared folder, "
            "or choose a corpus that prepares one (--data PythonSources)."
        )
    try:
        manifest = json.loads(read_text(f"{path}/{MANIFEST}"))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is not a prepared folder, it has no {MANIFEST}: set --data.path to one that is, "
            "or to a new name if a corpus is to be prepared there."
        ) from error
    except ValueError as error:
        raise UserError(_damaged(f"{path}/{MANIFEST}", str(error))) from error
    missing = [key for key in REQUIRED if key not in manifest] if isinstance(manifest, dict) else list(REQUIRED)
    if missing:
        raise UserError(_damaged(f"{path}/{MANIFEST}", f"without {', '.join(missing)}"))
    if manifest["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} has shards of format {manifest['format_version']} and this version reads {FORMAT_VERSION}: "
            "remove the folder and prepare it again."
        )
    return manifest


def chunks_of(path: str, split: str) -> list[dict[str, Any]]:
    """litdata's record of each chunk of a split: `filename`, `chunk_bytes`, `dim` (tokens).

    Raises:
        UserError: the index is missing or damaged.
    """
    index = f"{path}/{split}/index.json"
    try:
        return json.loads(read_text(index))["chunks"]
    except FileNotFoundError as error:
        raise UserError(_damaged(index, "it is missing")) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(_damaged(index, str(error))) from error


def check_chunks(path: str, manifest: dict[str, Any]) -> None:
    """Compare the chunks with the index and the manifest; of local ones also the files' sizes.

    litdata itself waits for a missing or truncated chunk and then reports something else.

    Raises:
        UserError: a chunk is missing or has another length.
    """
    for split in SPLITS:
        chunks = chunks_of(path, split)
        tokens = sum(chunk["dim"] for chunk in chunks)
        if tokens != manifest[split]["tokens"]:
            raise UserError(
                _damaged(
                    f"{path}/{split}",
                    f"{tokens:,} tokens where the manifest has {manifest[split]['tokens']:,}",
                )
            )
        if is_remote(path):
            continue
        for chunk in chunks:
            file = Path(path, split, chunk["filename"])
            size = file.stat().st_size if file.is_file() else None
            if size != chunk["chunk_bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {chunk['chunk_bytes']:,}"
                raise UserError(_damaged(str(file), f"it {found}"))


def blocks_in(path: str, split: str, block_size: int) -> int:
    """How many blocks of `block_size` tokens a split serves; each chunk's tail is left out."""
    return sum(chunk["dim"] // block_size for chunk in chunks_of(path, split))


def _damaged(what: str, how: str) -> str:
    return f"{what} is damaged ({how}): copy the folder again, or remove it and prepare it again."

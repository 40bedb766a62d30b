"""The state of an output folder: finished or damaged, its settings, and which tasks are done."""

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.publish import (
    RECORD_ERRORS,
    check_records,
    count_skipped,
    join_streams,
)
from anlit.data.preparation.sources import file_sha256
from anlit.data.preparation.tasks import Job, Task, record_path
from anlit.data.storage.manifest import (
    MANIFEST,
    TASKS,
    TOKENIZER,
    damaged,
    read_manifest,
    read_tokenizer,
)
from anlit.data.storage.shards import check_chunks, lost_chunk, read_sources
from anlit.errors import UserError

LOCK = ".prepare.lock"
PUT_BACK = "put the old file back, or remove that folder and repeat the command"


class Damage(NamedTuple):
    """Why a finished folder cannot be read."""

    description: str
    is_of_index: bool  # so any chunk may be of another corpus


def is_finished(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder has a manifest; UserError if it holds no shards of `settings`."""
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(str(folder))
        refuse_other_settings(folder, manifest.get("settings"), settings)
        return True
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose a folder with --output, or --data.path")
    names = [path.name for path in sorted(folder.glob("*")) if path.name != LOCK]
    if names and TASKS not in names:
        raise UserError(
            f"{folder} is not a prepared folder, it has no {MANIFEST} but {names[0]}: "
            "choose a new folder with --output, or --data.path"
        )
    return False


def refuse_other_settings(folder: Path, stored: Any, settings: Mapping[str, Any]) -> None:
    """Raise UserError if a folder was prepared with other settings.

    Settings that the recipe lacks, such as the files of a source that is gone, are not compared.
    """
    stored = stored if isinstance(stored, dict) else {}
    differences = []
    for name in sorted(settings):
        if stored.get(name) != settings[name]:
            if name == "listing_sha256":
                differences.append("names or sizes of the source files")
            else:
                differences.append(f"{name} {stored.get(name)} → {settings[name]}")
    if differences:
        remedy = "remove the folder, or choose another (--output, or --data.path)"
        if (folder / MANIFEST).is_file():
            remedy += ", or read it unchanged with --data TokenShards"
        listed = ", ".join(differences)
        raise UserError(f"{folder} was prepared with other settings or files ({listed}): {remedy}")


def find_damage(folder: Path, checksums: bool) -> Damage | None:
    """Return what is wrong with a finished folder; None if nothing is.

    With `checksums` every chunk and every record is read.
    """
    manifest = read_manifest(str(folder))
    try:
        sources = read_sources(str(folder), manifest)
        if checksums:
            check_records(folder, manifest)
    except UserError as error:
        return Damage(_without_advice(error), is_of_index=True)
    try:
        for source in chain(*sources.values()):
            check_chunks(source, checksums)
        if manifest["tokenizer_sha256"] is not None:
            content = read_tokenizer(str(folder), manifest)
            if checksums:
                _check_vocabulary(folder, manifest, content)
    except UserError as error:
        return Damage(_without_advice(error), is_of_index=False)
    return None


def _check_vocabulary(folder: Path, manifest: dict[str, Any], content: bytes) -> None:
    """Raise UserError if the manifest has another vocabulary size than the tokenizer."""
    tokenizer = tokenizers.parse_tokenizer(content, str(folder / TOKENIZER))
    size = tokenizers.vocabulary_size(tokenizer)
    if size != manifest["vocab_size"]:
        damage = f"vocab_size is {manifest['vocab_size']} where the tokenizer has {size}"
        raise damaged(str(folder / MANIFEST), damage, manifest["command"])


def _without_advice(error: UserError) -> str:
    return re.split(": (?:copy|put) ", str(error))[0]


def is_done(job: Job, task: Task, checksums: bool) -> bool:
    """Whether a task has its record and its chunks; UserError if a source file has changed.

    Without `checksums`, only source files younger than the record are read, and no chunks.
    """
    path = record_path(job.folder, task.number)
    try:
        record = json.loads(path.read_bytes())
        streams = join_streams({task.number: record}, job.dtype)
        count_skipped({task.number: record})
        hashes = [file["sha256"] for file in record["files"]]
        pieces = list(zip(task.pieces, hashes, strict=True))
    except (OSError, *RECORD_ERRORS):
        return False  # the record is absent, or no task wrote it
    for (file, number, n_pieces), sha256 in pieces:
        if file.path is None:
            continue
        if not checksums and file.path.stat().st_ctime_ns <= path.stat().st_mtime_ns:
            continue
        if file_sha256(file.path, number, n_pieces) != sha256:
            raise UserError(f"{file.path} is not what {job.folder} was begun with: {PUT_BACK}")
    return not any(
        lost_chunk(f"{job.folder}/{name}", stream["chunks"], checksums)
        for name, stream in streams.items()
    )

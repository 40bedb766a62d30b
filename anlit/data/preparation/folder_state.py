"""The state of an output folder: is it finished, damaged, of other settings, of changed sources?

    DIR/tasks/sources.json     hash of the names, sizes and times of the source files

Source files with the same hash are taken to hold the same texts. Otherwise they are read and
compared with the hashes in the tasks' records. Files that were merely copied are found the same.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from anlit.config.labels import mapping
from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.publish import (
    RECORD_ERRORS,
    check_records,
    count_skipped,
    counts_of,
    join_streams,
    read_records,
)
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import CorpusFiles, file_sha256, lines_sha256
from anlit.data.preparation.tasks import Job, Task, record_path, tasks_of
from anlit.data.storage.manifest import (
    MANIFEST,
    TASKS,
    TOKENIZER,
    damage_error,
    read_manifest,
    read_tokenizer,
)
from anlit.data.storage.shards import check_chunks, find_bad_chunk, read_token_arrays
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.text import say

LOCK = ".prepare.lock"
PUT_BACK = "put the old file back, or remove that folder and repeat the command"
FILE_TIMES = "sources.json"
PieceKey = tuple[str, str | None]
"""A file's name, and the label of a piece, such as "2 of 5". None for a complete file."""


def check_folder(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the folder is finished: it has a manifest.

    Raise UserError if it holds something else than shards of `settings`.
    """
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
    The path of the source is not compared either: a copy of the same files is the same corpus.
    """
    stored = _flat(mapping(stored))
    current = _flat({name: value for name, value in settings.items() if name != "source"})
    differences = []
    for name, value in sorted(current.items()):
        if stored.get(name) != value:
            if name == "listing_sha256":
                differences.append("names or sizes of the source files")
            else:
                differences.append(f"{name} {stored.get(name)} → {value}")
    if differences:
        remedy = "remove the folder, or choose another (--output, or --data.path)"
        if (folder / MANIFEST).is_file():
            remedy += ", or read it unchanged with --data TokenShards"
        listed = ", ".join(differences)
        raise UserError(f"{folder} was prepared with other settings or files ({listed}): {remedy}")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with one key for each entry of `splits`, as in `splits.fraction`."""
    flat = {name: value for name, value in settings.items() if name != "splits"}
    for name, value in mapping(settings.get("splits")).items():
        flat[f"splits.{name}"] = value
    return flat


def find_damage(folder: Path, checksums: bool) -> str | None:
    """Return what is wrong with a finished folder. None if nothing is.

    With `checksums` every chunk and every record is read.
    """
    manifest = read_manifest(str(folder))
    try:
        arrays_by_split = read_token_arrays(str(folder), manifest)
        if checksums:
            check_records(folder, manifest)
        for array in chain.from_iterable(arrays_by_split.values()):
            check_chunks(array, checksums)
        if manifest["tokenizer_sha256"] is not None:
            content = read_tokenizer(str(folder), manifest)
            if checksums:
                _check_vocabulary(folder, manifest, content)
    except UserError as error:
        return re.split(": (?:copy|put) ", str(error))[0]  # without the advice
    return None


def _check_vocabulary(folder: Path, manifest: dict[str, Any], content: bytes) -> None:
    """Raise UserError if the manifest has another vocabulary size than the tokenizer."""
    tokenizer = tokenizers.parse_tokenizer(content, str(folder / TOKENIZER))
    size = tokenizers.vocabulary_size(tokenizer)
    if size != manifest["vocab_size"]:
        damage = f"vocab_size is {manifest['vocab_size']} where the tokenizer has {size}"
        raise damage_error(str(folder / MANIFEST), damage)


def check_task(job: Job, task: Task, checksums: bool) -> bool:
    """Return whether a task is done: it has its record and its chunks.

    Raise UserError if a source file has changed. Without `checksums`, only source files younger
    than the record are read, and no chunks.
    """
    path = record_path(job.folder, task.number)
    try:
        record = json.loads(path.read_bytes())
        streams = join_streams({task.number: record}, job.dtype)
        counts_of(streams)
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
    bad_chunks = [
        find_bad_chunk(f"{job.folder}/{name}", stream.chunks, checksums)
        for name, stream in streams.items()
    ]
    return not any(bad_chunks)


def times_sha256(paths: Mapping[str, Path]) -> str:
    """Hash the names, sizes and times of change of the source files."""
    lines = []
    for name, path in sorted(paths.items()):
        if path.is_file():
            status = path.stat()
            lines.append(f"{name}\t{status.st_size}\t{status.st_mtime_ns}")
    return lines_sha256(lines)


def write_times(folder: Path, times: str) -> None:
    """Remember that the shards hold the texts that the source files had at these times."""
    write_json(folder / TASKS / FILE_TIMES, {"times_sha256": times})


def check_sources(
    folder: Path,
    recipe: Recipe,
    source: CorpusFiles,
    manifest: Mapping[str, Any],
    times: str,
    read_all: bool,
) -> None:
    """Raise UserError if a source file on this machine has another content than the shards.

    Files are read if `times`, from `times_sha256`, have changed, or if `read_all` is set. Say if
    there are no files, and the folder was prepared from others.
    """
    prepared_from = mapping(manifest.get("settings")).get("source")
    if not source.paths and prepared_from not in (None, recipe.source):
        _say_of_other_source(folder, recipe.source, prepared_from)
    if not source.paths or (not read_all and _read_times(folder) == times):
        return
    recorded = _recorded_hashes(folder, manifest["tasks"])
    if recorded is None:
        say(
            f"{folder}/{TASKS} is not complete, so nobody can tell whether the source files have "
            "changed since: remove the folder and prepare it again if they have."
        )
        return
    reason = "to verify it" if read_all else "because the time of one has changed"
    say(f"Comparing {len(source.paths):,} source files with {folder}, {reason}.")
    changed = _changed_file(recipe, source, recorded)
    if changed is not None:
        raise UserError(
            f"{changed} is not what {folder} was prepared from: remove that folder and repeat the "
            "command to prepare it again, put the old file back, or read the folder unchanged with "
            "--data TokenShards"
        )
    say("Their contents are the same.")
    with suppress(OSError):  # the folder may be another user's; the next start reads them again
        write_times(folder, times)


@cache  # a command may come here twice
def _say_of_other_source(folder: Path, source: str | None, prepared_from: str) -> None:
    say(f"{source} has no files, so {folder} is read as it was prepared from {prepared_from}.")


def _read_times(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / TASKS / FILE_TIMES).read_bytes())["times_sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut
        return None


def _recorded_hashes(folder: Path, n_tasks: int) -> dict[PieceKey, str] | None:
    """Return the hash of each piece that the tasks have read. None if a record is missing."""
    hashes: dict[PieceKey, str] = {}
    try:
        for record in read_records(folder, n_tasks).values():
            for file in record["files"]:
                # As text, because anyone may have written the record.
                hashes[str(file["name"]), file.get("part")] = str(file["sha256"])
    except (OSError, *RECORD_ERRORS):
        return None
    return hashes


def _changed_file(recipe: Recipe, source: CorpusFiles, recorded: dict[PieceKey, str]) -> str | None:
    """Return the first source file that differs from its recorded hash. None if none does."""
    current: dict[PieceKey, str] = {}
    for task in tasks_of(source.listing().files, recipe):
        for piece in task.pieces:
            file = piece.file
            assert file.path is not None, "only files of this machine are compared"
            current[file.name, piece.label] = file_sha256(file.path, piece.number, piece.n_pieces)
    changed_names = {name for (name, _), _ in recorded.items() ^ current.items()}
    return min(changed_names, default=None)

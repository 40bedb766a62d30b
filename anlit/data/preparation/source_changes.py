"""Whether the source files of a finished folder still hold the texts that its shards were made of.

    DIR/tasks/sources.json     hash of the names, sizes and times of the source files

If that hash is the same, the texts are taken to be the same. Otherwise the files are read and
compared with the hashes in the tasks' records. Files that were merely copied are found the same.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from anlit.data.preparation.publish import RECORD_ERRORS, read_records
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import CorpusFiles, file_sha256, lines_sha256
from anlit.data.preparation.tasks import tasks_of
from anlit.data.storage.manifest import TASKS
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.text import say

FILE_TIMES = "sources.json"
PieceKey = tuple[str, str | None]
"""A file's name, and the label of a piece, such as "2 of 5"; None for a complete file."""


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
    read_all: bool,
) -> None:
    """Raise UserError if a source file on this machine has another content than the shards.

    Files are read if the time of one of them has changed, or if `read_all` is set.
    """
    times = times_sha256(source.paths)
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


def _read_times(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / TASKS / FILE_TIMES).read_bytes())["times_sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut
        return None


def _recorded_hashes(folder: Path, n_tasks: int) -> dict[PieceKey, str] | None:
    """Return the hash of each piece that the tasks have read; None if a record is missing."""
    hashes: dict[PieceKey, str] = {}
    try:
        for record in read_records(folder, n_tasks).values():
            for file in record["files"]:
                hashes[file["name"], file.get("part")] = file["sha256"]
    except (OSError, *RECORD_ERRORS):
        return None
    return hashes


def _changed_file(recipe: Recipe, source: CorpusFiles, recorded: dict[PieceKey, str]) -> str | None:
    """Return the first source file that differs from its recorded hash; None if none does."""
    missing = dict(recorded)
    for task in tasks_of(source.listing().files, recipe):
        for piece in task.pieces:
            file = piece.file
            assert file.path is not None, "only files of this machine are compared"
            sha256 = file.sha256
            if sha256 is None or piece.n_pieces > 1:
                sha256 = file_sha256(file.path, piece.number, piece.n_pieces)
            if missing.pop((file.name, piece.label), None) != sha256:
                return str(file.path)
    return next((name for name, _ in missing), None)

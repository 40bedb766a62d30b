"""Whether the source files of a finished folder still hold the texts that its shards were made of.

    DIR/tasks/sources.json     one hash of the names, sizes and times of the source files

If that hash is the same, the texts are taken to be the same. Otherwise the files are read and compared
with the hashes in the tasks' records; files that were merely copied are found the same.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from anlit.data.preparation.encode import record_path, tasks_of
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import file_sha256, lines_sha256
from anlit.data.storage.manifest import TASKS
from anlit.errors import UserError
from anlit.io.write import write_json
from anlit.reporting.text import say

TIMES = "sources.json"
Part = tuple[str, str | None]
"""A file's name, and which part of it, such as "2 of 5"; None for the whole."""


def times_sha256(paths: Mapping[str, Path]) -> str:
    """Hash of the names, sizes and times of change of the source files."""
    lines = []
    for name, path in sorted(paths.items()):
        if path.is_file():
            status = path.stat()
            lines.append(f"{name}\t{status.st_size}\t{status.st_mtime_ns}")
    return lines_sha256(lines)


def write_times(folder: Path, times: str) -> None:
    """Remember that the shards hold what the source files held at these times."""
    write_json(folder / TASKS / TIMES, {"times_sha256": times})


def check_sources(
    folder: Path, recipe: Recipe, manifest: Mapping[str, Any], read_all: bool
) -> None:
    """Raise UserError if a source file on this machine has another content than the shards.

    Files are read if one of them has another time than before, or if `read_all` is set.
    """
    paths = recipe.source.paths
    times = times_sha256(paths)
    if not paths or (not read_all and _times_of(folder) == times):
        return
    recorded = _recorded_hashes(folder, manifest["tasks"])
    if recorded is None:
        say(
            f"{folder}/{TASKS} is not complete, so nobody can tell whether the source files have "
            "changed since: remove the folder and prepare it again if they have."
        )
        return
    reason = "to verify it" if read_all else "because the time of one of them is another"
    say(f"Comparing {len(paths):,} source files with {folder}, {reason}.")
    changed = _changed_file(recipe, recorded)
    if changed is not None:
        raise UserError(
            f"{changed} is not what {folder} was prepared from: remove that folder and repeat the "
            "command to prepare it again, put the old file back, or read the folder as it is with "
            "--data TokenShards."
        )
    say("Their contents are the same.")
    with suppress(OSError):  # the folder may be another user's; the next start reads them again
        write_times(folder, times)


def _times_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / TASKS / TIMES).read_bytes())["times_sha256"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut
        return None


def _recorded_hashes(folder: Path, n_tasks: Any) -> dict[Part, str] | None:
    """The hash of each part of a source file that the tasks have read; None if a record is missing."""
    hashes: dict[Part, str] = {}
    try:
        for number in range(n_tasks):
            for file in json.loads(record_path(folder, number).read_bytes())["files"]:
                hashes[file["name"], file.get("part")] = file["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return hashes


def _changed_file(recipe: Recipe, recorded: dict[Part, str]) -> str | None:
    """The first source file that has another content than recorded, or that has none there."""
    unseen = dict(recorded)
    for task in tasks_of(recipe.source.listing().files, recipe):
        for piece in task.pieces:
            file = piece.file
            assert file.path is not None, "only files of this machine are compared"
            sha256 = file.sha256
            if sha256 is None or piece.parts > 1:
                sha256 = file_sha256(file.path, piece.part, piece.parts)
            if unseen.pop((file.name, piece.name), None) != sha256:
                return str(file.path)
    return next((name for name, _ in unseen), None)

"""Repair of a finished folder: its damage is found, and the folder is unfinished again for that part alone."""

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.preparation.publish import SOURCES, index_text, join_streams
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.sources import file_sha256
from anlit.data.preparation.workspace import Workspace
from anlit.data.storage.manifest import MANIFEST, TOKENIZER
from anlit.data.storage.shards import INDEX
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json


@dataclass(frozen=True)
class Damage:
    """What a finished folder lacks, and what it says about itself."""

    manifest: dict[str, Any]
    records: list[dict[str, Any]]
    """Of all groups, from sources.jsonl."""
    paths: list[Path]
    """Files that are missing or damaged."""
    groups: set[int]
    """The groups that have to be made again for it."""


def find_damage(target: Path, manifest: dict[str, Any], checksums: bool) -> Damage | None:
    """Compare a finished folder with its own records.

    Args:
        checksums: read the chunks and compare their checksums; otherwise only their sizes.

    Raises:
        UserError: the records are damaged themselves.
    """
    records, streams = _read_sources(target)
    if sum(stream["tokens"] for stream in streams.values()) != manifest["tokens"]:
        raise UserError(_unknown_sources(target))
    damage = Damage(manifest, records, [], set())
    for group in records:
        for name, stream in group["streams"].items():
            for chunk in stream["chunks"]:
                path = target / name / chunk["filename"]
                if not _is_intact(path, chunk, checksums):
                    damage.paths.append(path)
                    damage.groups.add(group["group"])
    dtype = np.dtype(manifest["dtype"])
    for name, stream in streams.items():
        path = target / name / INDEX
        if not path.is_file() or path.read_bytes() != index_text(stream["chunks"], dtype).encode():
            damage.paths.append(path)
    if not _has_tokenizer(target, manifest):
        damage.paths.append(target / TOKENIZER)
    return damage if damage.paths else None


def _is_intact(path: Path, chunk: dict[str, Any], checksums: bool) -> bool:
    if not path.is_file() or path.stat().st_size != chunk["chunk_bytes"]:
        return False
    return not checksums or zlib.crc32(path.read_bytes()) == chunk["crc32"]


def _has_tokenizer(target: Path, manifest: dict[str, Any]) -> bool:
    path, sha256 = target / TOKENIZER, manifest["tokenizer_sha256"]
    return sha256 is None or (path.is_file() and file_sha256(path) == sha256)


def begin_repair(workspace: Workspace, recipe: Recipe, damage: Damage) -> None:
    """Lay out the state of a preparation that has done everything but the damaged groups."""
    workspace.remove()
    workspace.make()
    recipe.source.pin(damage.manifest["pinned"])
    for group in damage.records:
        if group["group"] in damage.groups:
            hashes = {file["name"]: file["sha256"] for file in group["files"]}
            write_json(workspace.source_hashes(group["group"]), hashes)
        else:
            write_json(workspace.group_record(group["group"]), group)
    if damage.manifest["tokenizer_sha256"] is not None and _has_tokenizer(workspace.target, damage.manifest):
        with replacing(workspace.tokenizer) as temporary:
            shutil.copyfile(workspace.target / TOKENIZER, temporary)


def reopen(workspace: Workspace, damage: Damage) -> None:
    """Make the folder an unfinished one, after `begin_repair`, with a plan and a tokenizer.

    Raises:
        UserError: the tokenizer was lost and another one has come in its place.
    """
    sha256 = damage.manifest["tokenizer_sha256"]
    if sha256 is not None and file_sha256(workspace.tokenizer) != sha256:
        raise UserError(
            f"{workspace.target / TOKENIZER} is missing or damaged and cannot be made again as it was: copy the folder "
            "again, or remove it and repeat the command."
        )
    (workspace.target / MANIFEST).unlink()


def _read_sources(target: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The records of all groups, and the streams that they make."""
    try:
        # Not splitlines(): it also cuts at line separators inside of names.
        lines = (target / SOURCES).read_text(encoding="utf-8").split("\n")
        groups = [json.loads(line) for line in lines if line]
        if [group["group"] for group in groups] != list(range(len(groups))):
            raise KeyError("group")
        return groups, join_streams(groups, str(target / SOURCES))
    except UserError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(_unknown_sources(target)) from error


def _unknown_sources(target: Path) -> str:
    return f"{target / SOURCES} is missing or damaged: copy the folder again, or remove it and repeat the command."

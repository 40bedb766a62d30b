"""The last step: the records of all tasks become index.json of each stream and manifest.json."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.preparation.encode import COUNTS, SKIPPED_LISTED, Job, chunk_name, record_path
from anlit.data.preparation.sources import Listing
from anlit.data.storage.manifest import (
    CHANGES,
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TASKS,
    TRAIN,
    VAL,
    checked_path,
    damaged,
)
from anlit.data.storage.shards import INDEX, Chunk, chunk_bytes, content_sha256
from anlit.errors import UserError
from anlit.io.provenance import versions
from anlit.io.write import TEMPORARY, write_json

LITDATA_NUMPY_NUMBER = {"uint16": 5, "int32": 2}  # of `litdata.constants._NUMPY_DTYPES_MAPPING`
Streams = dict[str, dict[str, Any]]


def publish(
    job: Job,
    plan: dict[str, Any],
    listing: Listing,
    records: Mapping[int, dict[str, Any]],
    command: str,
) -> None:
    """Finish the folder; UserError if there is nothing to train on or to validate with."""
    streams, skipped = join(records, job.dtype, listing.skipped)
    counts = counts_of(streams)
    if missing := [split for split in (TRAIN, VAL) if split not in counts["splits"]]:
        forget(job.folder)
        splits = job.recipe.splits
        advice = "prepare more text"
        if splits.fraction or splits.first_tokens:
            option = "--val_fraction" if splits.fraction else "--val_tokens"
            advice = f"{advice}, or hold out another part of it with {option}"
        raise UserError(
            f"The corpus leaves no document for {missing[0]}, it has {len(listing.files):,} file(s): {advice}."
        )
    for name, stream in streams.items():
        write_json(job.folder / name / INDEX, _index(stream["chunks"], job.dtype))
    _remove_leftovers(job.folder, streams)
    document_token_at = "start" if job.recipe.tokenized else "end"
    chunks = {name: stream["chunks"] for name, stream in streams.items()}
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "corpus": job.recipe.corpus,
        "command": command,
        **plan,
        "tasks": len(records),
        "files": len(listing.files),
        **counts,
        "skipped": skipped,
        "vocab_size": job.vocab_size,
        "dtype": job.dtype.name,
        "end_of_document": job.end_of_document,
        "document_token_at": document_token_at,
        "content_sha256": content_sha256(chunks, job.end_of_document, job.dtype, document_token_at),
        "versions": versions(),
    }
    write_json(job.folder / MANIFEST, manifest)


def check_records(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise UserError if the manifest counts other documents than the records of the tasks.

    A folder that was copied without its records passes.
    """
    try:
        records = {
            number: json.loads(record_path(folder, number).read_bytes())
            for number in range(manifest["tasks"])
        }
        streams, _ = join(records, np.dtype(manifest["dtype"]))
        counts = counts_of(streams)
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(
            f"{folder}/{TASKS}", f"a record is not what a task writes ({error})"
        ) from error
    for key, count in counts.items():
        if manifest.get(key) != count:
            how = f"{key} is {manifest.get(key)} where the records of its tasks have {count}"
            raise damaged(f"{folder}/{MANIFEST}", how, manifest["command"])


def counts_of(streams: Streams) -> dict[str, Any]:
    """What the manifest says of streams: the counts of all, and of each split and subset."""
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        of_split = {
            name.partition("/")[2]: stream
            for name, stream in streams.items()
            if name.split("/")[0] == split
        }
        if of_split:
            subsets = {name: _sum([stream]) for name, stream in of_split.items() if name}
            splits[split] = _sum(of_split.values()) | ({"subsets": subsets} if subsets else {})
    return {**_sum(streams.values()), "splits": list(splits), **splits}


def forget(folder: Path) -> None:
    """Remove all that an unfinished preparation has made; what was fetched stays."""
    if (folder / TASKS).is_dir():  # so the folder is ours
        for path in (folder / TASKS).glob("*.json"):
            path.unlink()
        for split in SPLITS:
            shutil.rmtree(folder / split, ignore_errors=True)


def _remove_leftovers(folder: Path, streams: Streams) -> None:
    """Remove what was fetched, temporary files of killed processes, and chunks of tasks that were done anew."""
    named = {
        folder / name / chunk.filename for name in streams for chunk in streams[name]["chunks"]
    }
    chunks = {path for split in SPLITS for path in (folder / split).rglob("chunk-*.bin")}
    for path in [
        *(chunks - named),
        *folder.rglob(f"*{TEMPORARY}*"),
        *(folder / TASKS).glob("source-*"),
    ]:
        path.unlink(missing_ok=True)
    for path in (folder / TASKS).glob("download-*"):
        shutil.rmtree(path, ignore_errors=True)


def join(
    records: Mapping[int, dict[str, Any]], dtype: np.dtype, skipped: Mapping[str, list[str]] = {}
) -> tuple[Streams, dict[str, dict[str, Any]]]:
    """The counts and `Chunk`s of each stream, and for each reason what was left out: how often, and the first places.

    A record that is not what a task writes raises KeyError, TypeError, ValueError or AttributeError.
    """
    streams: Streams = {}
    counts = Counter({reason: len(names) for reason, names in skipped.items()})
    places = {reason: list(names) for reason, names in skipped.items()}
    for task, record in records.items():
        for name, stream in record["streams"].items():
            if checked_path(name, "A record", most_parts=2).split("/")[0] not in SPLITS:
                raise ValueError(name)
            empty = {**dict.fromkeys(COUNTS, 0), "chunks": [], "changes": Counter()}
            total = streams.setdefault(name, empty)
            for key in COUNTS:
                total[key] += stream[key]
            total["changes"].update(stream["changes"])
            for number, (tokens, crc32) in enumerate(stream["chunks"]):
                total["chunks"].append(
                    Chunk(chunk_name(task, number), chunk_bytes(tokens, dtype), tokens, crc32)
                )
        for file in record["files"]:
            for reason, count in file.get("skipped", {}).items():
                counts[reason] += count
            for where, reason, _ in file.get("skipped_list", ()):
                places.setdefault(reason, []).append(f"{file['name']}, {where}")
    listed = {
        reason: {"count": n, "listed": places.get(reason, [])[:SKIPPED_LISTED]}
        for reason, n in counts.items()
    }
    return dict(sorted(streams.items())), dict(sorted(listed.items()))


def _sum(streams: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Documents, bytes (None for token files, whose text is not known), tokens and chunks of some streams.

    Where documents do not come back from their tokens, also how many of each kind.
    """
    chosen = list(streams)
    total: dict[str, Any] = {key: sum(stream[key] for stream in chosen) for key in COUNTS}
    total["bytes"] = total["bytes"] or None
    total["chunks"] = sum(len(stream["chunks"]) for stream in chosen)
    changes = Counter[str]()
    for stream in chosen:
        changes.update(stream["changes"])
    return total | ({CHANGES: dict(changes)} if changes else {})


def _index(chunks: list[Chunk], dtype: np.dtype) -> dict[str, Any]:
    """litdata's index.json, as its own writer makes it for a `TokensLoader`."""
    config = {
        "chunk_bytes": max(chunk.size for chunk in chunks),
        **dict.fromkeys(("chunk_size", "compression", "encryption")),
        "data_format": [f"no_header_numpy:{LITDATA_NUMPY_NUMBER[dtype.name]}"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "item_loader": "TokensLoader",
    }
    keys = ("filename", "chunk_bytes", "dim", "crc32")
    return {
        "chunks": [dict(zip(keys, chunk, strict=True)) | {"chunk_size": 1} for chunk in chunks],
        "config": config,
    }

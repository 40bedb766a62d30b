"""The last step: the records of all tasks become index.json of each stream, and manifest.json."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anlit.data.preparation.sources import Listing
from anlit.data.preparation.tasks import COUNT_KEYS, SKIPPED_LISTED, Job, chunk_name, record_path
from anlit.data.storage.manifest import (
    CHANGES,
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TASKS,
    TEXT_HASH,
    TRAIN,
    VAL,
    add_text_hashes,
    checked_path,
    damage_error,
)
from anlit.data.storage.shards import INDEX, Chunk, chunk_bytes, content_sha256
from anlit.errors import UserError
from anlit.io.provenance import versions
from anlit.io.write import TEMPORARY, write_json

LITDATA_NUMPY_NUMBER = {"uint16": 5, "int32": 2}
"""litdata's number of a dtype, from `litdata.constants._NUMPY_DTYPES_MAPPING`."""
RECORD_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a record raises if no task wrote it."""


class Stream(NamedTuple):
    """A subfolder of the prepared folder: a split such as `val`, or its subset `val/Github`."""

    records: list[dict[str, Any]]
    """What each task has counted in it."""
    chunks: list[Chunk]


def publish(
    job: Job,
    plan: dict[str, Any],
    listing: Listing,
    records: Mapping[int, dict[str, Any]],
    command: str,
) -> None:
    """Finish the folder. Raise UserError if there is nothing to train on or to validate with."""
    streams = join_streams(records, job.dtype)
    counts = counts_of(streams)
    skipped = count_skipped(records, listing.skipped)
    for split in (TRAIN, VAL):
        if split not in counts["splits"]:
            forget(job.folder)
            contents = f"{counts['documents']:,} document(s) in {len(listing.files):,} file(s)"
            reasons = [f"{reason} {entry['count']:,}" for reason, entry in skipped.items()]
            left_out = f", others are skipped ({', '.join(reasons)})" if reasons else ""
            raise UserError(
                f"The corpus leaves no document for {split}, it has {contents}{left_out}: prepare "
                "more text, or hold out another part of it (--val_fraction of your own files and "
                "of the hub's)"
            )
    for name, stream in streams.items():
        write_json(job.folder / name / INDEX, _index(stream.chunks, job.dtype))
    _remove_leftovers(job.folder, streams)
    # Files of tokens have it before each document; the encoder of texts writes it after each.
    document_token_at = "start" if job.recipe.is_tokenized else "end"
    chunks = {name: stream.chunks for name, stream in streams.items()}
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
        records = read_records(folder, manifest["tasks"])
        counts = counts_of(join_streams(records, np.dtype(manifest["dtype"])))
    except FileNotFoundError:
        return
    except RECORD_ERRORS as error:
        damage = f"a record is not what a task writes ({error})"
        raise damage_error(f"{folder}/{TASKS}", damage) from error
    for key, count in counts.items():
        if manifest.get(key) != count:
            damage = f"{key} is {manifest.get(key)} where the records of its tasks have {count}"
            raise damage_error(f"{folder}/{MANIFEST}", damage)


def read_records(folder: Path, n_tasks: int) -> dict[int, dict[str, Any]]:
    """Read the records of all tasks, as anybody may have written them."""
    records = {}
    for task in range(n_tasks):
        records[task] = json.loads(record_path(folder, task).read_bytes())
    return records


def join_streams(records: Mapping[int, dict[str, Any]], dtype: np.dtype) -> dict[str, Stream]:
    """Join the streams of all tasks. Raises `RECORD_ERRORS` if no task wrote a record."""
    streams: dict[str, Stream] = {}
    for task, record in records.items():
        for name, counts in record["streams"].items():
            if checked_path(name, "A record", max_depth=2).split("/")[0] not in SPLITS:
                raise ValueError(name)
            stream = streams.setdefault(name, Stream([], []))
            stream.records.append(counts)
            for number, (n_tokens, crc32) in enumerate(counts["chunks"]):
                size = chunk_bytes(n_tokens, dtype)
                stream.chunks.append(Chunk(chunk_name(task, number), size, n_tokens, crc32))
    return dict(sorted(streams.items()))


def count_skipped(
    records: Mapping[int, dict[str, Any]], skipped_files: Mapping[str, list[str]] = {}
) -> dict[str, dict[str, Any]]:
    """Return how many files and documents were left out for each reason, and the first of them.

    `skipped_files` has the names of files that no task reads, by reason.

    Raises the same errors as `join_streams`.
    """
    counts = Counter({reason: len(names) for reason, names in skipped_files.items()})
    locations = {reason: list(names) for reason, names in skipped_files.items()}
    for record in records.values():
        for file in record["files"]:
            for reason, count in file.get("skipped", {}).items():
                counts[reason] += count
            for location, reason, _ in file.get("skipped_list", ()):
                locations.setdefault(reason, []).append(f"{file['name']}, {location}")
    skipped = {}
    for reason, count in sorted(counts.items()):
        listed = locations.get(reason, [])[:SKIPPED_LISTED]
        skipped[reason] = {"count": count, "listed": listed}
    return skipped


def counts_of(streams: Mapping[str, Stream]) -> dict[str, Any]:
    """Return the counts in the manifest: of all streams, and of each split and subset."""
    counts_by_split: dict[str, dict[str, Any]] = {}
    for name, stream in streams.items():
        split, _, subset = name.partition("/")
        if split not in counts_by_split:
            in_split = [streams[other] for other in streams if other.split("/")[0] == split]
            counts_by_split[split] = _sum(in_split)
        if subset:
            counts_by_split[split].setdefault("subsets", {})[subset] = _sum([stream])
    by_split = {split: counts_by_split[split] for split in SPLITS if split in counts_by_split}
    return {**_sum(streams.values()), "splits": list(by_split), **by_split}


def _sum(streams: Iterable[Stream]) -> dict[str, Any]:
    """Return documents, bytes, tokens, chunks and changes of some streams.

    `bytes` is None for files of tokens: their text is unknown. `changes` is absent if all texts
    come back from their tokens. The hash of the text is absent if it is unknown.
    """
    records = list(chain.from_iterable(stream.records for stream in streams))
    total: dict[str, Any] = {}
    for key in COUNT_KEYS:
        total[key] = sum(record[key] for record in records)
    total["bytes"] = total["bytes"] or None
    total["chunks"] = sum(len(record["chunks"]) for record in records)
    text_hash = add_text_hashes(record.get(TEXT_HASH) for record in records)
    if text_hash is not None:
        total[TEXT_HASH] = text_hash
    changes = Counter[str]()
    for record in records:
        changes.update(record["changes"])
    if changes:
        total[CHANGES] = dict(changes)
    return total


def forget(folder: Path) -> None:
    """Remove the files of an unfinished preparation, except files that were fetched."""
    if (folder / TASKS).is_dir():  # so a preparation made the folder
        for path in (folder / TASKS).glob("*.json"):
            path.unlink()
        for split in SPLITS:
            shutil.rmtree(folder / split, ignore_errors=True)


def _remove_leftovers(folder: Path, streams: Mapping[str, Stream]) -> None:
    """Remove fetched files, temporary files of killed processes, and chunks of earlier attempts."""
    indexed: set[Path] = set()
    for name, stream in streams.items():
        indexed.update(folder / name / chunk.filename for chunk in stream.chunks)
    for split in SPLITS:
        for path in set((folder / split).rglob("chunk-*.bin")) - indexed:
            path.unlink(missing_ok=True)
    for path in [*folder.rglob(f"*{TEMPORARY}*"), *(folder / TASKS).glob("source-*")]:
        path.unlink(missing_ok=True)
    for path in (folder / TASKS).glob("download-*"):
        shutil.rmtree(path, ignore_errors=True)


def _index(chunks: list[Chunk], dtype: np.dtype) -> dict[str, Any]:
    """Return litdata's index.json, as its own writer makes it for a `TokensLoader`."""
    config = {
        "chunk_bytes": max(chunk.size for chunk in chunks),
        "chunk_size": None,
        "compression": None,
        "encryption": None,
        "data_format": [f"no_header_numpy:{LITDATA_NUMPY_NUMBER[dtype.name]}"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "item_loader": "TokensLoader",
    }
    entries = []
    for chunk in chunks:
        entries.append(
            {
                "filename": chunk.filename,
                "chunk_bytes": chunk.size,
                "dim": chunk.tokens,
                "crc32": chunk.crc32,
                "chunk_size": 1,
            }
        )
    return {"chunks": entries, "config": config}

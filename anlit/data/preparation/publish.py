"""The last step: the records of all tasks become index.json of each stream and manifest.json."""

import hashlib
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.preparation.encode import COUNTS, SKIPPED_LISTED, Job, chunk_name
from anlit.data.preparation.sources import Listing
from anlit.data.storage.manifest import FORMAT_VERSION, MANIFEST, SPLITS, TASKS, TRAIN, VAL
from anlit.data.storage.shards import INDEX, chunk_bytes
from anlit.errors import UserError
from anlit.reporting.files import TEMPORARY, replacing, write_json

LITDATA_NUMPY_NUMBER = {"uint16": 5, "int32": 2}
"""litdata's numbers for the types of tokens, `litdata.constants._NUMPY_DTYPES_MAPPING`."""
Streams = dict[str, dict[str, Any]]


def publish(
    job: Job, plan: dict[str, Any], listing: Listing, records: list[dict[str, Any]], command: str
) -> dict[str, Any]:
    """Finish the folder; its manifest. Every file is a function of the records: doing it twice changes nothing.

    Raises UserError if there is nothing to train on, or nothing to validate with.
    """
    streams = join_streams(records, job.dtype)
    splits = {split: _of_split(streams, split) for split in SPLITS if _of_split(streams, split)}
    for split in (TRAIN, VAL):
        if split not in splits:
            forget(job.folder)
            raise UserError(
                f"The corpus leaves no document for {split}, it has {len(listing.files):,} file(s): prepare more text, "
                "or hold out another part of it (--val_fraction, --val_tokens)."
            )
    for name, stream in streams.items():
        with replacing(job.folder / name / INDEX) as temporary:
            temporary.write_text(index_text(stream["chunks"], job.dtype), encoding="utf-8")
    _remove_leftovers(job.folder, streams)
    identity = {
        "streams": {name: [(chunk["dim"], chunk["crc32"]) for chunk in streams[name]["chunks"]] for name in streams},
        "end_of_document": job.end_of_document,
        "dtype": job.dtype.name,
    }
    manifest = {
        "format_version": FORMAT_VERSION,
        "corpus": job.recipe.corpus,
        "command": command,
        **plan,
        "tasks": len(records),
        "files": len(listing.files),
        **_sum(streams.values()),
        "splits": list(splits),
        **splits,
        "skipped": _skipped(listing, records),
        "vocab_size": job.vocab_size,
        "dtype": job.dtype.name,
        "end_of_document": job.end_of_document,
        "document_token_at": "start" if job.recipe.tokenized else "end",
        "content_sha256": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("anlit", "tokenizers", "pyarrow", "zstandard")},
        },
    }
    write_json(job.folder / MANIFEST, manifest)
    return manifest


def forget(folder: Path) -> None:
    """Remove all that an unfinished preparation has made; what was fetched stays."""
    if (folder / TASKS).is_dir():  # so the folder is ours
        for path in (folder / TASKS).glob("*.json"):
            path.unlink()
        for split in SPLITS:
            shutil.rmtree(folder / split, ignore_errors=True)


def _remove_leftovers(folder: Path, streams: Streams) -> None:
    """Remove what was fetched, temporary files of killed processes, and chunks of tasks that were done anew."""
    named = {folder / name / chunk["filename"] for name in streams for chunk in streams[name]["chunks"]}
    chunks = [path for split in SPLITS for path in (folder / split).rglob("chunk-*.bin") if path not in named]
    for path in [*chunks, *folder.rglob(f"*{TEMPORARY}*"), *(folder / TASKS).glob("source-*")]:
        path.unlink(missing_ok=True)
    for path in (folder / TASKS).glob("download-*"):
        shutil.rmtree(path, ignore_errors=True)


def join_streams(records: list[dict[str, Any]], dtype: np.dtype) -> Streams:
    """The streams of all tasks, one after the other, with their chunks as litdata's index.json has them."""
    streams: Streams = {}
    for task, record in enumerate(records):
        for name, stream in record["streams"].items():
            total = streams.setdefault(name, {**dict.fromkeys(COUNTS, 0), "chunks": []})
            for key in COUNTS:
                total[key] += stream[key]
            for number, (tokens, crc32) in enumerate(stream["chunks"]):
                size = chunk_bytes(tokens, dtype)
                file = {"filename": chunk_name(task, number), "chunk_bytes": size, "crc32": crc32}
                total["chunks"].append({**file, "chunk_size": 1, "dim": tokens})
    return dict(sorted(streams.items()))


def _of_split(streams: Streams, split: str) -> dict[str, Any]:
    """The counts of a split and of each of its subsets; {} if there is none of it."""
    own = {name: stream for name, stream in streams.items() if name.split("/")[0] == split}
    subsets = {name.split("/")[1]: _sum([stream]) for name, stream in own.items() if "/" in name}
    return own and _sum(own.values()) | ({"subsets": subsets} if subsets else {})


def _sum(streams: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Documents, bytes (None for token files, whose text is not known), tokens and chunks of some streams."""
    chosen = list(streams)
    total = {key: sum(stream[key] for stream in chosen) for key in COUNTS}
    return {**total, "bytes": total["bytes"] or None, "chunks": sum(len(stream["chunks"]) for stream in chosen)}


def _skipped(listing: Listing, records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was left out: for each reason how often, and where (the first `SKIPPED_LISTED` places)."""
    counts = Counter({reason: len(names) for reason, names in listing.skipped.items()})
    listed = {reason: list(names) for reason, names in listing.skipped.items()}
    for file in (file for record in records for file in record["files"]):
        counts.update(file.get("skipped", {}))
        for where, reason, _ in file.get("skipped_list", ()):
            listed.setdefault(reason, []).append(f"{file['name']}, {where}")
    return {
        reason: {"count": n, "listed": listed.get(reason, [])[:SKIPPED_LISTED]} for reason, n in sorted(counts.items())
    }


def index_text(chunks: list[dict[str, Any]], dtype: np.dtype) -> str:
    """litdata's index.json, as its own writer makes it for a `TokensLoader`."""
    config = {
        "chunk_bytes": max(chunk["chunk_bytes"] for chunk in chunks),
        "chunk_size": None,
        "compression": None,
        "data_format": [f"no_header_numpy:{LITDATA_NUMPY_NUMBER[dtype.name]}"],
        "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    return json.dumps({"chunks": chunks, "config": config}, sort_keys=True)

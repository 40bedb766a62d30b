"""The records of tasks become those of groups; at the end index.json of each stream, sources.jsonl, manifest.json."""

import hashlib
import json
import platform
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from anlit.data.preparation.encode import SKIPPED_LISTED, Job
from anlit.data.preparation.plan import Plan
from anlit.data.preparation.sources import file_sha256
from anlit.data.preparation.workspace import Workspace, read_json
from anlit.data.storage.manifest import FORMAT_VERSION, MANIFEST, TEST, TOKENIZER, TRAIN, VAL
from anlit.data.storage.shards import INDEX, checked_chunk, checked_stream
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json, write_text

SOURCES = "sources.jsonl"
COUNTS = ("documents", "bytes", "tokens")
LITDATA_NUMPY_NUMBER = {"uint16": 5, "int32": 2}
"""litdata's numbers for the types of tokens, `litdata.constants._NUMPY_DTYPES_MAPPING`."""


def write_group(workspace: Workspace, group: int, n_tasks: int, source_sha256: dict[str, str]) -> None:
    """Write the record of a group, all tasks of which are encoded.

    Args:
        source_sha256: of each source file of the group.
    """
    tasks = [read_json(workspace.task_record(group, task)) for task in range(n_tasks)]
    files: dict[str, dict[str, Any]] = {}
    for piece in (piece for task in tasks for piece in task["files"]):
        name = piece["name"]
        file = files.setdefault(name, {"name": name, "sha256": source_sha256[name], **dict.fromkeys(COUNTS, 0)})
        for key in COUNTS:
            file[key] += piece[key]
        if "skipped" in piece:
            file["skipped"] = dict(Counter(file.get("skipped", {})) + Counter(piece["skipped"]))
            file.setdefault("skipped_list", []).extend(piece["skipped_list"])
    streams = join_streams(tasks, str(workspace.tasks))
    write_json(workspace.group_record(group), {"group": group, "files": list(files.values()), "streams": streams})


def publish(job: Job, plan: Plan, corpus: str, command: str, token_at: str) -> dict[str, Any]:
    """Finish the folder. Every file is a function of the groups' records: doing it twice changes nothing.

    Returns:
        The manifest.

    Raises:
        UserError: there is nothing to train on, or nothing to validate with.
    """
    workspace = job.workspace
    groups = [read_json(workspace.group_record(group)) for group in range(len(plan.groups))]
    streams = join_streams(groups, str(workspace.groups))
    splits = [split for split in (TRAIN, VAL, TEST) if any(_split_of(name) == split for name in streams)]
    for split in (TRAIN, VAL):
        if split not in splits:
            workspace.start_over()
            raise UserError(
                f"The corpus leaves no document for {split}, it has {len(plan.files):,} file(s): prepare more text, or "
                "hold out another part of it (--val_fraction, --val_tokens)."
            )
    for name, stream in streams.items():
        _remove_others(workspace.target / name, {chunk["filename"] for chunk in stream["chunks"]})
        with replacing(workspace.target / name / INDEX) as temporary:
            temporary.write_text(index_text(stream["chunks"], job.dtype), encoding="utf-8")
    if workspace.tokenizer.is_file():
        with replacing(workspace.target / TOKENIZER) as temporary:
            shutil.copyfile(workspace.tokenizer, temporary)
    lines = [json.dumps(group, ensure_ascii=False) for group in groups]
    write_text(workspace.target / SOURCES, "\n".join(lines) + "\n")
    manifest = {
        "format_version": FORMAT_VERSION,
        "corpus": corpus,
        "command": command,
        "settings": plan.settings,
        "pinned": plan.pinned,
        "files": len(plan.files),
        **_sum(streams.values()),
        "splits": splits,
        **{split: _split(streams, split) for split in splits},
        "skipped": _skipped(plan, groups),
        "vocab_size": job.vocab_size,
        "dtype": np.dtype(job.dtype).newbyteorder("=").name,
        "end_of_document": job.end_of_document,
        "document_token_at": token_at,
        "tokenizer_sha256": file_sha256(workspace.tokenizer) if workspace.tokenizer.is_file() else None,
        "content_sha256": _content_sha256(streams, job),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("anlit", "tokenizers", "pyarrow", "zstandard")},
        },
    }
    write_json(workspace.target / MANIFEST, manifest)
    return manifest


def join_streams(records: list[dict[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """The streams of tasks or groups, one after the other.

    Args:
        where: the folder or the file of the records, for errors.

    Raises:
        UserError: the name of a stream or a chunk leads out of the folder.
        KeyError, TypeError: a record is damaged in another way.
    """
    streams: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, stream in record["streams"].items():
            for chunk in stream["chunks"]:
                checked_chunk(chunk, where)
            empty = {**dict.fromkeys(COUNTS, 0), "chunks": []}
            total = streams.setdefault(checked_stream(name, where), empty)
            for key in (*COUNTS, "chunks"):
                total[key] += stream[key]
    return dict(sorted(streams.items()))


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the chunks of tasks that were begun with another source file and not finished."""
    for path in folder.glob("chunk-*.bin"):
        if path.name not in names:
            path.unlink()


def _split_of(stream: str) -> str:
    return stream.split("/")[0]


def _sum(streams: Any) -> dict[str, Any]:
    """Documents, bytes (None for token files, whose text is not known), tokens and chunks of some streams."""
    chosen = list(streams)
    total = {key: sum(stream[key] for stream in chosen) for key in COUNTS}
    return {**total, "bytes": total["bytes"] or None, "chunks": sum(len(stream["chunks"]) for stream in chosen)}


def _split(streams: dict[str, dict[str, Any]], split: str) -> dict[str, Any]:
    parts = {name: stream for name, stream in streams.items() if _split_of(name) == split}
    subsets = {name.split("/", 1)[1]: _sum([stream]) for name, stream in parts.items() if "/" in name}
    return {**_sum(parts.values()), **({"subsets": subsets} if subsets else {})}


def _skipped(plan: Plan, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was left out: for each reason how often, and where (the first `SKIPPED_LISTED` places)."""
    counts = Counter({reason: len(names) for reason, names in plan.skipped.items()})
    listed = {reason: list(names) for reason, names in plan.skipped.items()}
    for file in (file for group in groups for file in group["files"]):
        counts.update(file.get("skipped", {}))
        for where, reason, _ in file.get("skipped_list", ()):
            listed.setdefault(reason, []).append(f"{file['name']}, {where}")
    return {reason: {"count": n, "listed": listed[reason][:SKIPPED_LISTED]} for reason, n in sorted(counts.items())}


def _content_sha256(streams: dict[str, dict[str, Any]], job: Job) -> str:
    """Identity of what the shards hold, wherever they lie and however they were made."""
    chunks = {name: [(chunk["dim"], chunk["crc32"]) for chunk in stream["chunks"]] for name, stream in streams.items()}
    identity = {"streams": chunks, "end_of_document": job.end_of_document, "dtype": job.dtype.name}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


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

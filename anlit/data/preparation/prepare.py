"""Prepares a corpus as a folder of token shards, in one run or after any number of interruptions.

    DIR/<split>/[<subset>/]   litdata chunks and their index: documents, each with its end-of-document token
    DIR/tokenizer.json
    DIR/tasks/                plan.json, and a record for each task: source files, their hashes, what was skipped
    DIR/manifest.json         what the shards hold and how they were made; written last

The same files and settings give the same shards, whatever the machine, the workers and the interruptions. What is
missing in a finished folder is a task that is not done, and the same command does it.
"""

import errno
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.encode import Job, Task, lost_chunks, read_record, record_path, tasks_of
from anlit.data.preparation.executors import run_tasks
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.hub import COMMIT, HubFiles, fetch_tokenizer
from anlit.data.preparation.publish import content_sha256, forget, index_text, join_streams, publish
from anlit.data.preparation.recipes import BPE, HUB_TOKENIZERS, NO_TOKENIZER, Recipe
from anlit.data.preparation.sources import Listing, Source, file_sha256
from anlit.data.storage.manifest import MANIFEST, TASKS, TOKENIZER, TRAIN, read_manifest
from anlit.data.storage.shards import INDEX
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json
from anlit.reporting.provenance import cores
from anlit.reporting.text import say, visible

LOCK = ".prepare.lock"
PLAN = "plan.json"
PLANNED = {"settings", "commit", "files_sha256", "tokenizer_sha256"}
TOKENIZER_BYTES = 256 << 20
"""Text that a BPE is trained on, at most."""
GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT = 50257, 50256


@dataclass(frozen=True)
class RunOptions:
    """How to prepare: nothing here changes what the shards hold."""

    workers: int | None = None
    """Processes; by default one for each core this process may use."""
    cluster: str | None = None
    """Address of a Dask scheduler, whose workers do the work instead."""
    skip_bad: bool = False
    """Leave out documents that cannot be used, count and list them; otherwise the first one stops the preparation."""
    verify: bool = False
    """Compare the checksum of every chunk of a finished folder, not only its size."""
    command: str = ""
    """The command that makes the folder, for the manifest and the errors of those who read it."""


def prepare(path: str | Path, recipe: Recipe, options: RunOptions | None = None) -> dict[str, Any]:
    """Make `path` the prepared folder of `recipe`: begin it, go on, or do again what is missing in it.

    Returns:
        The manifest.

    Raises:
        UserError: the folder holds something else; a source or a document cannot be used; the disk is full.
    """
    options = options or RunOptions()
    target = Path(path)
    with _plain_errors(target):
        if _lost_files(target, recipe, options.verify) == []:
            return read_manifest(str(target))
        _refuse_links(target)
        with _lock(target):
            lost = _lost_files(target, recipe, options.verify)
            if lost == []:  # another process was faster
                return read_manifest(str(target))
            if lost is not None:
                say(f"{lost[0]} is missing or damaged ({len(lost)} in all): making again what is lost.")
            return _make(target, recipe, options)


def _lost_files(target: Path, recipe: Recipe, verify: bool) -> list[Path] | None:
    """What a finished folder lacks; None for an unfinished one.

    Raises:
        UserError: it is a folder of something else, was made with other settings, or contradicts itself.
    """
    if not (target / MANIFEST).is_file():
        _refuse_foreign(target)
        return None
    manifest = read_manifest(str(target))
    _refuse_differences(target, manifest.get("settings"), recipe.settings())
    _read_plan(target)
    tasks, dtype = manifest.get("tasks"), np.dtype(manifest["dtype"])
    if not isinstance(tasks, int):
        raise UserError(_damaged(target / MANIFEST))
    lost: list[Path] = []
    records = []
    for task in range(tasks):
        record = read_record(target, task)
        if record is None:
            return [record_path(target, task)]
        lost += lost_chunks(target, task, record, dtype, verify)
        records.append(record)
    streams = join_streams(records, dtype)
    if content_sha256(streams, manifest["end_of_document"], dtype) != manifest["content_sha256"]:
        raise UserError(_damaged(target / TASKS))
    for name, stream in streams.items():
        path = target / name / INDEX
        if not path.is_file() or path.read_bytes() != index_text(stream["chunks"], dtype).encode():
            lost.append(path)
    if not _has_tokenizer(target, manifest["tokenizer_sha256"]):
        lost.append(target / TOKENIZER)
    return lost


def _has_tokenizer(target: Path, sha256: str | None) -> bool:
    path = target / TOKENIZER
    return sha256 is None or (path.is_file() and file_sha256(path) == sha256)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: choose a folder with --output, or --data.path.")
    if target.is_dir() and not (target / TASKS).is_dir():
        foreign = [path for path in sorted(target.iterdir()) if path.name != LOCK]
        if foreign:
            raise UserError(
                f"{target} is not a prepared folder, it has no {MANIFEST} but {foreign[0].name}: "
                "choose a new one with --output, or --data.path."
            )


def _refuse_links(target: Path) -> None:
    """Raise UserError for a folder with links in it: what is written and removed by them would be elsewhere."""
    for path in target.rglob("*"):
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link, and nothing is written through one: remove that link.")


def _refuse_differences(target: Path, then: Any, now: dict[str, Any]) -> None:
    """Raise UserError if an existing folder's settings differ; what is not known now is not compared."""
    then = then if isinstance(then, dict) else {}
    differs = [
        "names or sizes of the source files" if key == "listing_sha256" else f"{key} {then.get(key)} → {now[key]}"
        for key in sorted(now)
        if then.get(key) != now[key]
    ]
    if differs:
        what = f"with other settings or files ({', '.join(differs)}): remove the folder, or choose another (--output,"
        if not (target / MANIFEST).is_file():
            raise UserError(f"The preparation of {target} was begun {what} or --data.path).")
        raise UserError(f"{target} was prepared {what} or --data.path), or read it as it is with --data TokenShards.")


def _make(target: Path, recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """Do what is not done yet, and publish."""
    plan, listing, content = _begin(target, recipe)
    job = _job(target, recipe, options, plan, content)
    tasks = tasks_of(listing.files, recipe)
    done: list[Task] = []
    left: list[Task] = []
    for task in tasks:
        (done if _is_done(job, task, options.verify) else left).append(task)
    size = sum(file.size for file in listing.files)
    say(f"Preparing {recipe.corpus}: {len(listing.files):,} files, {size / 1e6:,.1f} MB.")
    (target / MANIFEST).unlink(missing_ok=True)  # a folder that is mended is unfinished until its end
    run_tasks(job, left, done, options.workers or cores(), options.cluster)
    records = [read_record(target, task.number) for task in tasks]
    manifest = publish(job, recipe, plan, listing, [record for record in records if record], options.command)
    parts = [f"{manifest[split]['tokens']:,} tokens in {split}" for split in manifest["splits"]]
    skipped = sum(reason["count"] for reason in manifest["skipped"].values())
    say(f"{target}: {', '.join(parts)}; {manifest['documents']:,} documents, {skipped:,} skipped.")
    return manifest


def _begin(target: Path, recipe: Recipe) -> tuple[dict[str, Any], Listing, bytes | None]:
    """What is fixed before the first task: the settings, the hub's commit, the files, the tokenizer.

    It is written down, and a preparation that goes on keeps to it. One whose first task is not done is forgotten if
    the settings or the files are others now: the first command was a mistake.

    Raises:
        UserError: the preparation was begun with other settings or files; the tokenizer cannot be had.
    """
    settings = recipe.settings()
    then = _read_plan(target)
    begun = (target / MANIFEST).is_file() or read_record(target, 0) is not None
    if then is not None and begun:
        _refuse_differences(target, then["settings"], settings)
        recipe.source.commit = then["commit"]
    elif then is not None and then["settings"] == settings:
        recipe.source.commit = then["commit"]
    listing = recipe.source.listing()
    recipe.splits.check(listing.files)
    plan = {"settings": settings, "commit": recipe.source.commit, "files_sha256": listing.sha256()}
    if then is not None and plan != {key: then[key] for key in plan}:
        if begun:
            raise UserError(
                f"The source files are not those that {target} was begun with: put the old files back, or remove that "
                "folder and repeat the command."
            )
        forget(target)
        then = None
    content = _tokenizer(target, recipe, listing, then)
    tokenizer_sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    plan["tokenizer_sha256"] = tokenizer_sha256
    if then is not None and plan != then:
        raise UserError(
            f"{target / TOKENIZER} is missing or damaged and cannot be made again as it was: copy the folder "
            "again, or remove it and repeat the command."
        )
    (target / TASKS).mkdir(exist_ok=True)
    if content is not None and not _has_tokenizer(target, tokenizer_sha256):
        with replacing(target / TOKENIZER) as temporary:
            temporary.write_bytes(content)
    if then is None:
        write_json(target / TASKS / PLAN, plan)
    return plan, listing, content


def _read_plan(target: Path) -> dict[str, Any] | None:
    """The plan of a folder, None if none was written. Its commit is the only part that becomes an address.

    Raises:
        UserError: it is damaged, or missing in a finished folder.
    """
    path = target / TASKS / PLAN
    if not path.is_file() and not (target / MANIFEST).is_file():
        return None
    try:
        plan = json.loads(path.read_bytes())
        is_commit = plan["commit"] is None or COMMIT.fullmatch(plan["commit"])
        if not (is_commit and plan.keys() == PLANNED and isinstance(plan["settings"], dict)):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(_damaged(path)) from error
    return plan


def _damaged(path: Path) -> str:
    return f"{path} is missing or damaged: copy the folder again, or remove it and repeat the command."


def _tokenizer(target: Path, recipe: Recipe, listing: Listing, then: dict[str, Any] | None) -> bytes | None:
    """The content of the folder's tokenizer.json: what is there, one that exists elsewhere, or one trained on the text.

    Raises:
        UserError: it cannot be fetched or is none, or the vocabulary is too small for a trained one.
    """
    if recipe.tokenizer == NO_TOKENIZER:
        if not recipe.tokenized:
            raise UserError("--tokenizer none is for files that hold tokens already: choose gpt2, gpt-neox or a file.")
        return None
    if then is not None and _has_tokenizer(target, then["tokenizer_sha256"]):
        return (target / TOKENIZER).read_bytes()
    if recipe.tokenizer == BPE:
        say(f"Training the tokenizer: {recipe.vocab_size:,} tokens.")
        trained = tokenizers.train_bpe(_training_texts(target, recipe, listing), recipe.vocab_size)
        return trained.to_str(pretty=True).encode()
    hub = HUB_TOKENIZERS.get(recipe.tokenizer)
    path = fetch_tokenizer(hub) if hub else Path(recipe.tokenizer)
    tokenizers.load_tokenizer(path)
    return path.read_bytes()


def _training_texts(target: Path, recipe: Recipe, listing: Listing) -> Iterator[str]:
    """The first texts of the training part, `TOKENIZER_BYTES` of them."""
    (target / TASKS).mkdir(exist_ok=True)
    given = 0
    for file in listing.files:
        split = recipe.splits.of_file(file)
        if split != TRAIN:
            continue
        for record in read_file(file.name, recipe.source.fetched(file, target / TASKS), recipe.columns):
            if record.text is None or recipe.splits.of_text(record.text, split) != TRAIN:
                continue
            yield record.text
            given += record.size
            if given >= TOKENIZER_BYTES:
                return


def _job(target: Path, recipe: Recipe, options: RunOptions, plan: dict[str, Any], content: bytes | None) -> Job:
    """What all tasks have in common."""
    vocab_size, end_of_document = GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT
    if content is not None:
        tokenizer = tokenizers.parse_tokenizer(content, str(target / TOKENIZER))
        vocab_size = tokenizers.vocabulary_size(tokenizer)
        end_of_document = tokenizers.end_of_document_id(tokenizer, recipe.end_of_document)
    return Job(
        folder=target,
        source=recipe.source if isinstance(recipe.source, HubFiles) else Source(),
        columns=recipe.columns,
        splits=recipe.splits,
        tokenizer_sha256=None if recipe.tokenized else plan["tokenizer_sha256"],
        vocab_size=vocab_size,
        end_of_document=end_of_document,
        skip_bad=options.skip_bad,
        chunk_bytes=recipe.chunk_bytes,
    )


def _is_done(job: Job, task: Task, checksums: bool) -> bool:
    """Whether a task has its record and its chunks.

    Args:
        checksums: compare those of the chunks, too.

    Raises:
        UserError: a file on this machine, younger than the record, is not what the task was made of.
    """
    record = read_record(job.folder, task.number)
    if record is None or len(record["files"]) != len(task.pieces):
        return False
    written = record_path(job.folder, task.number).stat().st_mtime_ns
    for (file, _, *part), then in zip(task.pieces, record["files"], strict=True):
        if file.path and file.path.stat().st_ctime_ns > written and file_sha256(file.path, *part) != then["sha256"]:
            raise UserError(
                f"{file.path} is not what {job.folder} was begun with: put the old file back, or remove that folder "
                "and repeat the command."
            )
    return not any(lost_chunks(job.folder, task.number, record, job.dtype, checksums))


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Keep a second process away from the same folder; waits for it and says so.

    The lock is the operating system's and ends with its process, however that ends. Its empty file stays.
    """
    target.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process is preparing {target}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _plain_errors(target: Path) -> Iterator[None]:
    """Turn every failure into one sentence, which says that the finished part is kept."""
    kept = "what is done so far is kept, repeat the command to go on"
    try:
        yield
    except UserError as error:  # names of files may hold line breaks
        raise UserError(visible(str(error))) from error
    except BrokenProcessPool as error:
        raise UserError(
            f"A worker process was killed, perhaps for want of memory: {kept} (with fewer --workers if it recurs)."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"The disk of {target} is full: free some space; {kept}.") from error
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(visible(f"{where}{error.strerror or error}; {kept}.")) from error

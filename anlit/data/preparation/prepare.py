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
import re
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.encode import Job, Task, lost_chunks, read_record, record_path, tasks_of
from anlit.data.preparation.executors import run_tasks
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.hub import COMMIT, HubFiles, fetch_tokenizer
from anlit.data.preparation.publish import forget, publish
from anlit.data.preparation.recipes import BPE, HUB_TOKENIZERS, NO_TOKENIZER, Recipe
from anlit.data.preparation.sources import Listing, Source, file_sha256
from anlit.data.storage.manifest import MANIFEST, TASKS, TOKENIZER, TRAIN, read_manifest, read_tokenizer
from anlit.data.storage.shards import check_chunks, sources_of
from anlit.errors import UserError
from anlit.reporting.files import replacing, write_json
from anlit.reporting.provenance import cores
from anlit.reporting.text import say, without_control_codes

LOCK = ".prepare.lock"
PLAN = "plan.json"
PLANNED = ("settings", "commit", "files_sha256", "tokenizer_sha256")
TOKENIZER_BYTES = 256 << 20  # text that a BPE is trained on, at most
GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT = 50257, 50256


@dataclass(frozen=True)
class RunOptions:
    """How to prepare: nothing here changes what the shards hold."""

    workers: int | None = None  # processes; by default one for each core this process may use
    cluster: str | None = None  # address of a Dask scheduler, whose workers do the work instead
    skip_bad: bool = False
    """Leave out documents that cannot be used, count and list them; otherwise the first one stops the preparation."""
    verify: bool = False  # compare the checksum of every chunk of a finished folder, not only its size
    command: str = ""  # the command that makes the folder, for the manifest and the errors of those who read it


def prepare(path: str | Path, recipe: Recipe, options: RunOptions | None = None) -> dict[str, Any]:
    """Make `path` the prepared folder of `recipe`: begin it, go on, or do again what is missing in it; its manifest.

    Raises UserError if the folder holds something else, a source or a document cannot be used, or the disk is full.
    """
    options = options or RunOptions()
    target = Path(path)
    with _plain_errors(target):
        if not _is_finished(target, recipe, options.verify):
            for file in target.rglob("*"):
                if file.is_symlink():
                    raise UserError(f"{file} is a symbolic link, and nothing is written through one: remove that link.")
            with _lock(target):
                if not _is_finished(target, recipe, options.verify, say):  # another process may have been faster
                    _make(target, recipe, options)
        return read_manifest(str(target))


def _is_finished(
    target: Path, recipe: Recipe, checksums: bool, tell: Callable[[str], None] = lambda line: None
) -> bool:
    """Whether a folder has its manifest and all that a reader needs; UserError for a folder of something else.

    Args:
        checksums: compare those of the chunks, too.
        tell: is told what is missing.
    """
    if not (target / MANIFEST).is_file():
        _refuse_foreign(target)
        return False
    manifest = read_manifest(str(target))
    _refuse_differences(target, manifest.get("settings"), recipe.settings())
    try:
        for split in manifest["splits"]:
            for source in sources_of(str(target), manifest, split):
                check_chunks(source, checksums)
        if manifest["tokenizer_sha256"] is not None:
            read_tokenizer(str(target), manifest)
    except UserError as error:
        tell(f"{re.split(': (?:copy|put) ', str(error))[0]}: making again what is lost.")
        return False
    return True


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


def _refuse_differences(target: Path, then: Any, now: dict[str, Any]) -> None:
    """Raise UserError if an existing folder's settings differ; what is not known now is not compared."""
    then = then if isinstance(then, dict) else {}
    differs = [
        "names or sizes of the source files" if key == "listing_sha256" else f"{key} {then.get(key)} → {now[key]}"
        for key in sorted(now)
        if then.get(key) != now[key]
    ]
    if differs:
        as_it_is = ", or read it as it is with --data TokenShards" if (target / MANIFEST).is_file() else ""
        raise UserError(
            f"{target} was prepared with other settings or files ({', '.join(differs)}): remove the folder, or choose "
            f"another (--output, or --data.path){as_it_is}."
        )


def _make(target: Path, recipe: Recipe, options: RunOptions) -> None:
    """Do what is not done yet, and publish."""
    plan, listing, content = _begin(target, recipe)
    vocab_size, end_of_document = GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT
    if content is not None:
        tokenizer = tokenizers.parse_tokenizer(content, str(target / TOKENIZER))
        vocab_size = tokenizers.vocabulary_size(tokenizer)
        end_of_document = tokenizers.end_of_document_id(tokenizer, recipe.options.end_of_document)
    fetching = recipe if isinstance(recipe.source, HubFiles) else replace(recipe, source=Source())
    job = Job(target, fetching, plan["tokenizer_sha256"], vocab_size, end_of_document, options.skip_bad)
    tasks = tasks_of(listing.files, recipe)
    done = {task: _is_done(job, task, options.verify) for task in tasks}
    say(f"Preparing {recipe.corpus}: {len(listing.files):,} files, {sum(task.size for task in tasks) / 1e6:,.1f} MB.")
    (target / MANIFEST).unlink(missing_ok=True)  # a folder that is mended is unfinished until its end
    run_tasks(job, done, options.workers or cores(), options.cluster)
    records = [read_record(target, task.number) for task in tasks]
    manifest = publish(job, plan, listing, [record for record in records if record], options.command)
    parts = [f"{manifest[split]['tokens']:,} tokens in {split}" for split in manifest["splits"]]
    skipped = sum(reason["count"] for reason in manifest["skipped"].values())
    say(f"{target}: {', '.join(parts)}; {manifest['documents']:,} documents, {skipped:,} skipped.")


def _begin(target: Path, recipe: Recipe) -> tuple[dict[str, Any], Listing, bytes | None]:
    """What is fixed before the first task: the settings, the hub's commit, the files, the tokenizer's content.

    It is written down, and a preparation that goes on keeps to it. One whose first task is not done begins anew: its
    command may have been a mistake. UserError if settings or files are others, or the tokenizer cannot be had.
    """
    settings = recipe.settings()
    then: dict[str, Any] | None = None
    if (target / MANIFEST).is_file() or read_record(target, 0) is not None:
        then = _read_plan(target)
        _refuse_differences(target, then["settings"], settings)
        recipe.source.commit = then["commit"]
    else:
        forget(target)
    listing = recipe.source.listing()
    recipe.splits.check(listing.files)
    (target / TASKS).mkdir(exist_ok=True)
    content = _tokenizer(target, recipe, listing, then)
    tokenizer_sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    plan = dict(zip(PLANNED, (settings, recipe.source.commit, listing.sha256(), tokenizer_sha256), strict=True))
    if then is not None and plan != then:
        raise UserError(
            f"The source files or the tokenizer are not those that {target} was begun with: put the old files back, or "
            "remove that folder and repeat the command."
        )
    if content is not None and not _has_tokenizer(target, tokenizer_sha256):
        with replacing(target / TOKENIZER) as temporary:
            temporary.write_bytes(content)
    write_json(target / TASKS / PLAN, plan)
    return plan, listing, content


def _read_plan(target: Path) -> dict[str, Any]:
    """What a folder was begun with, or UserError. Its commit is the only part that becomes an address."""
    path = target / MANIFEST if (target / MANIFEST).is_file() else target / TASKS / PLAN
    try:
        content = json.loads(path.read_bytes())
        plan = {key: content[key] for key in PLANNED}
        if plan["commit"] is None or COMMIT.fullmatch(plan["commit"]):
            return plan
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise _damaged(path)


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is missing or damaged: copy the folder again, or remove it and repeat the command.")


def _tokenizer(target: Path, recipe: Recipe, listing: Listing, then: dict[str, Any] | None) -> bytes | None:
    """The content of the folder's tokenizer.json: what is there, one that exists elsewhere, or one trained on the text.

    Raises UserError if it cannot be fetched or is none, or the vocabulary is too small for a trained one.
    """
    if recipe.tokenizer == NO_TOKENIZER:
        if not recipe.tokenized:
            raise UserError("--tokenizer none is for files that hold tokens already: choose gpt2, gpt-neox or a file.")
        return None
    if then is not None and _has_tokenizer(target, then["tokenizer_sha256"]):
        return (target / TOKENIZER).read_bytes()
    if recipe.tokenizer == BPE:
        say(f"Training the tokenizer: {recipe.options.vocab_size:,} tokens.")
        trained = tokenizers.train_bpe(_training_texts(target, recipe, listing), recipe.options.vocab_size)
        return trained.to_str(pretty=True).encode()
    hub = HUB_TOKENIZERS.get(recipe.tokenizer)
    path = fetch_tokenizer(hub) if hub else Path(recipe.tokenizer)
    tokenizers.load_tokenizer(path)
    return path.read_bytes()


def _training_texts(target: Path, recipe: Recipe, listing: Listing) -> Iterator[str]:
    """The first texts of the training part, `TOKENIZER_BYTES` of them."""
    given = 0
    for file in (file for file in listing.files if recipe.splits.of_file(file) == TRAIN):
        for record in read_file(file.name, recipe.source.fetched(file, target / TASKS), recipe.columns):
            if record.text is not None and recipe.splits.of_text(record.text, TRAIN) == TRAIN:
                yield record.text
                given += record.size
                if given >= TOKENIZER_BYTES:
                    return


def _is_done(job: Job, task: Task, checksums: bool) -> bool:
    """Whether a task has its record and its chunks; UserError for a file that is younger and has another content."""
    record = read_record(job.folder, task.number)
    if record is None or len(record["files"]) != len(task.pieces):
        return False
    written = record_path(job.folder, task.number).stat().st_mtime_ns
    for (file, *part), then in zip(task.pieces, record["files"], strict=True):
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
        raise UserError(without_control_codes(str(error))) from error
    except BrokenProcessPool as error:
        raise UserError(
            f"A worker process was killed, perhaps for want of memory: {kept} (with fewer --workers if it recurs)."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"The disk of {target} is full: free some space; {kept}.") from error
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(without_control_codes(f"{where}{error.strerror or error}; {kept}.")) from error

"""Prepares a corpus as a folder of token shards, in one run or after any number of interruptions.

    DIR/<split>/[<subset>/]   litdata chunks and their index: documents, each with its end-of-document token
    DIR/tokenizer.json
    DIR/tasks/                plan.json, and a record for each task: source files, their hashes, what was skipped
    DIR/manifest.json         what the shards hold and how they were made; written last

The same files and settings give the same shards, whatever the machine, the workers and the interruptions.
"""

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from filelock import AcquireReturnProxy, FileLock, Timeout

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.encode import KEPT, Job, Task, bad_document, record_path, tasks_of
from anlit.data.preparation.executors import run_tasks
from anlit.data.preparation.formats import read_file
from anlit.data.preparation.hub import COMMIT, HubFiles, fetch_tokenizer
from anlit.data.preparation.publish import check_records, forget, join, publish
from anlit.data.preparation.recipes import BPE, HUB_TOKENIZERS, NO_TOKENIZER, Recipe
from anlit.data.preparation.source_changes import check_sources, times_sha256, write_times
from anlit.data.preparation.sources import OTHER_FORMAT, Listing, Source, file_sha256, lines_sha256
from anlit.data.round_trip import Kind, RoundTrip
from anlit.data.storage.manifest import (
    CHANGES,
    MANIFEST,
    TASKS,
    TOKENIZER,
    TRAIN,
    damaged,
    read_manifest,
    read_tokenizer,
)
from anlit.data.storage.shards import check_chunks, lost_chunk, read_sources
from anlit.errors import UserError
from anlit.io.provenance import cores
from anlit.io.read import read_json
from anlit.io.write import replacing, write_json
from anlit.reporting.text import say, without_control_codes

LOCK = ".prepare.lock"
PLAN = "plan.json"
PLANNED = ("settings", "commit", "files_sha256", "tokenizer_sha256")
TOKENIZER_BYTES = 256 << 20  # text that a BPE is trained on, at most
GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT = 50257, 50256
MOST_HELD_OUT = 0.3  # of the tokens, without a word
COMES_BACK = {
    Kind.NORMALISED: "in another Unicode normal form",
    Kind.CHANGED: "as another text, so no bits per byte are reported for a split that has one",
}
PUT_BACK = "put the old one back, or remove that folder and repeat the command"


def prepare(
    path: str | Path,
    recipe: Recipe,
    command: str,
    workers: int | None = None,
    cluster: str | None = None,
    skip_bad: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Make `path` the prepared folder of `recipe`: begin it, go on, or do again what is missing in it; its manifest.

    Args:
        command: the one that makes the folder, for the manifest and the errors of those who read it.
        workers: processes, by default one for each core.
        cluster: address of a Dask scheduler, whose workers do the work instead.
        skip_bad: leave out documents that cannot be used, count and list them; otherwise the first one is an error.
        verify: compare the checksum of every chunk and every source file of a finished folder, not only sizes and
            times.

    Raises UserError if the folder holds something else, a source or a document cannot be used, or the disk is full.
    """
    target = Path(path)
    with _plain_errors(target):
        times = times_sha256(recipe.source.paths)
        if _is_finished(target, recipe) and _damage(target, verify) is None:
            manifest = read_manifest(str(target))
            check_sources(target, recipe, manifest, verify)
            return manifest
        for file in target.rglob("*"):
            if file.is_symlink():
                raise UserError(
                    f"{file} is a symbolic link, and nothing is written through one: remove that link."
                )
        with _locked(target):
            if _is_finished(target, recipe):
                damage = _damage(target, verify)
                if damage is None:  # another process was faster
                    return read_manifest(str(target))
                say(f"{damage.what}: making again what is lost.")
                verify = verify or damage.is_of_index
            plan, listing, job = _begin(target, recipe, skip_bad)
            tasks = tasks_of(listing.files, recipe)
            done = {task: _is_done(job, task, verify) for task in tasks}
            size = sum(task.size for task in tasks) / 1e6
            say(f"Preparing {recipe.corpus}: {len(listing.files):,} files, {size:,.1f} MB.")
            if others := listing.skipped.get(OTHER_FORMAT):
                say(
                    f"{len(others):,} files are left out, because they may be copies in another "
                    f"format; the first is {others[0]}."
                )
            (target / MANIFEST).unlink(
                missing_ok=True
            )  # a folder that is mended is unfinished until its end
            run_tasks(job, done, workers or cores(), cluster)
            records = {
                task.number: json.loads(record_path(target, task.number).read_bytes())
                for task in tasks
            }
            write_times(target, times)
            publish(job, plan, listing, records, command)
            manifest = read_manifest(str(target))
            _say_result(target, manifest)
            _say_changes(target, manifest, records)
            return manifest


def _say_result(target: Path, manifest: Mapping[str, Any]) -> None:
    tokens = [f"{manifest[split]['tokens']:,} tokens in {split}" for split in manifest["splits"]]
    skipped = sum(reason["count"] for reason in manifest["skipped"].values())
    say(f"{target}: {', '.join(tokens)}; {manifest['documents']:,} documents, {skipped:,} skipped.")
    share = manifest["val"]["tokens"] / max(1, manifest["tokens"])
    if share > MOST_HELD_OUT:
        say(f"{target}: val has {share:.0%} of the tokens, because documents are held out whole.")


def _say_changes(
    target: Path, manifest: Mapping[str, Any], records: Mapping[int, dict[str, Any]]
) -> None:
    """Say how many documents do not come back from their tokens, and show the first."""
    first: dict[str, str] = {}
    for record in records.values():
        for file in record["files"]:
            for kind, place in file.get("first_change", {}).items():
                first.setdefault(kind, f"{file['name']}, {place}")
    for kind, count in manifest.get(CHANGES, {}).items():
        say(
            f"{target}: {count:,} of {manifest['documents']:,} documents come back from their tokens "
            f"{COMES_BACK[kind]}; the first is {first[kind]}."
        )


class Damage(NamedTuple):
    """Why a finished folder cannot be read."""

    what: str
    is_of_index: bool  # so that any chunk may be of another corpus


def _is_finished(target: Path, recipe: Recipe) -> bool:
    """Whether the folder has a manifest; UserError if it holds something else than this recipe's shards."""
    if (target / MANIFEST).is_file():
        manifest = read_manifest(str(target))
        _refuse_differences(target, manifest.get("settings"), recipe.settings())
        return True
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: choose a folder with --output, or --data.path.")
    names = [path.name for path in sorted(target.glob("*")) if path.name != LOCK]
    if names and TASKS not in names:
        raise UserError(
            f"{target} is not a prepared folder, it has no {MANIFEST} but {names[0]}: "
            "choose a new one with --output, or --data.path."
        )
    return False


def _damage(target: Path, checksums: bool) -> Damage | None:
    """What is wrong with a finished folder. With `checksums` every chunk and every record is read."""
    manifest = read_manifest(str(target))
    try:
        sources = read_sources(str(target), manifest)
        if checksums:
            check_records(target, manifest)
    except UserError as error:
        return Damage(_without_advice(error), is_of_index=True)
    try:
        for source in chain(*sources.values()):
            check_chunks(source, checksums)
        if manifest["tokenizer_sha256"] is not None:
            content = read_tokenizer(str(target), manifest)
            if checksums:
                _check_vocabulary(target, manifest, content)
    except UserError as error:
        return Damage(_without_advice(error), is_of_index=False)
    return None


def _check_vocabulary(target: Path, manifest: dict[str, Any], content: bytes) -> None:
    """Raise UserError if the manifest has another vocabulary size than the tokenizer."""
    tokenizer = tokenizers.parse_tokenizer(content, str(target / TOKENIZER))
    size = tokenizers.vocabulary_size(tokenizer)
    if size != manifest["vocab_size"]:
        how = f"vocab_size is {manifest['vocab_size']} where the tokenizer has {size}"
        raise damaged(str(target / MANIFEST), how, manifest["command"])


def _without_advice(error: UserError) -> str:
    return re.split(": (?:copy|put) ", str(error))[0]


def _refuse_differences(target: Path, then: Any, now: Mapping[str, Any]) -> None:
    """Raise UserError if an existing folder's settings differ; what is not known now is not compared."""
    then = then if isinstance(then, dict) else {}
    differs = [
        "names or sizes of the source files"
        if key == "listing_sha256"
        else f"{key} {then.get(key)} → {now[key]}"
        for key in sorted(now)
        if then.get(key) != now[key]
    ]
    if differs:
        as_it_is = (
            ", or read it as it is with --data TokenShards" if (target / MANIFEST).is_file() else ""
        )
        raise UserError(
            f"{target} was prepared with other settings or files ({', '.join(differs)}): remove the folder, or choose "
            f"another (--output, or --data.path){as_it_is}."
        )


def _begin(target: Path, recipe: Recipe, skip_bad: bool) -> tuple[dict[str, Any], Listing, Job]:
    """What is fixed before the first task, and written down: a preparation that goes on keeps to it.

    One whose first task is not done begins anew: its command may have been a mistake.
    """
    settings, then = recipe.settings(), None
    if (target / MANIFEST).is_file() or record_path(target, 0).is_file():
        path = target / MANIFEST if (target / MANIFEST).is_file() else target / TASKS / PLAN
        there = read_json(
            path, {}, advice := "copy the folder again, or remove it and repeat the command"
        )
        then = {key: there.get(key) for key in PLANNED}
        _refuse_differences(target, then["settings"], settings)
        if not COMMIT.fullmatch(str(then["commit"] or 40 * "0")):  # it becomes an address
            raise UserError(
                f"{path} cannot be used (its commit is {then['commit']!r:.50}): {advice}."
            )
        recipe.source.commit = then["commit"]
    else:
        forget(target)
    listing = recipe.source.listing()
    if listing.bad and not skip_bad:
        raise bad_document(listing.bad)
    recipe.splits.check(listing.files)
    (target / TASKS).mkdir(exist_ok=True)
    content = _tokenizer(target, recipe, listing, then, skip_bad)
    sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    files = (f"{file.name}\t{file.size}\t{file.sha256}\t{file.split}" for file in listing.files)
    plan = dict(
        zip(PLANNED, (settings, recipe.source.commit, lines_sha256(files), sha256), strict=True)
    )
    if then is not None and plan != then:
        raise UserError(
            f"The source files or the tokenizer are not what {target} was begun with: {PUT_BACK}."
        )
    vocab_size, end_of_document = GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT
    if content is not None:
        tokenizer = tokenizers.parse_tokenizer(content, str(target / TOKENIZER))
        vocab_size = tokenizers.vocabulary_size(tokenizer)
        end_of_document = tokenizers.end_of_document_id(tokenizer, recipe.options.end_of_document)
        if tokenizers.has_dropout(content):
            say("The tokenizer's dropout is switched off: a text has the same tokens each time.")
        if not recipe.tokenized and RoundTrip(tokenizer).decodes:
            say(
                "Each document is decoded again, to see whether it comes back: this tokenizer may "
                "change texts. Encoding takes a tenth to a half longer."
            )
        with replacing(target / TOKENIZER) as temporary:
            temporary.write_bytes(content)
    write_json(target / TASKS / PLAN, plan)
    fetching = recipe if isinstance(recipe.source, HubFiles) else replace(recipe, source=Source())
    return plan, listing, Job(target, fetching, sha256, vocab_size, end_of_document, skip_bad)


def _tokenizer(
    target: Path,
    recipe: Recipe,
    listing: Listing,
    then: Mapping[str, Any] | None,
    skip_bad: bool,
) -> bytes | None:
    """The content of the folder's tokenizer.json: what is there, that of another file, or one trained on the text."""
    if recipe.tokenizer == NO_TOKENIZER:
        if not recipe.tokenized:
            raise UserError(
                "--tokenizer none is for files that hold tokens already: choose gpt2, gpt-neox or a file."
            )
        return None
    own = target / TOKENIZER
    if then is not None and own.is_file() and file_sha256(own) == then["tokenizer_sha256"]:
        return own.read_bytes()
    if recipe.tokenizer == BPE:
        say(f"Training the tokenizer: {recipe.options.vocab_size:,} tokens.")
        trained = tokenizers.train_bpe(
            _training_texts(target, recipe, listing, skip_bad), recipe.options.vocab_size
        )
        return trained.to_str(pretty=True).encode()
    hub = HUB_TOKENIZERS.get(recipe.tokenizer)
    path = fetch_tokenizer(hub) if hub else Path(recipe.tokenizer)
    tokenizers.load_tokenizer(path)
    return path.read_bytes()


def _training_texts(
    target: Path, recipe: Recipe, listing: Listing, skip_bad: bool
) -> Iterator[str]:
    """The first texts of the training part, `TOKENIZER_BYTES` of them.

    UserError for a document that cannot be used, unless such are left out, or if there is no text.
    """
    n_bytes = 0
    for file in (file for file in listing.files if recipe.splits.of_file(file) == TRAIN):
        path = recipe.source.fetched(file, target / TASKS)
        for record in read_file(file.name, path, recipe.columns):
            if record.text is None:
                if not skip_bad:
                    where = path if file.path else file.name
                    raise bad_document(f"{where}, {record.where}: {record.detail}")
            elif recipe.splits.of_text(record.text, TRAIN) == TRAIN:
                yield record.text
                n_bytes += record.size
                if n_bytes >= TOKENIZER_BYTES:
                    return
    if n_bytes == 0:
        raise UserError(
            "The corpus has no text to train a tokenizer on: check --source, --pattern and "
            "--text_field (--data.source and so on)."
        )


def _is_done(job: Job, task: Task, checksums: bool) -> bool:
    """Whether a task has its record and its chunks; UserError for a source file that has another content now.

    Without `checksums` only source files that are younger than the record are read, and no chunks.
    """
    path = record_path(job.folder, task.number)
    try:
        record = json.loads(path.read_bytes())
        streams, _ = join({task.number: record}, job.dtype)
        files = list(zip(task.pieces, (file["sha256"] for file in record["files"]), strict=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False  # it is absent, or not what a task writes
    for (file, *part), sha256 in files:
        if file.path is None:
            continue
        if not checksums and file.path.stat().st_ctime_ns <= path.stat().st_mtime_ns:
            continue
        if file_sha256(file.path, *part) != sha256:
            raise UserError(f"{file.path} is not what {job.folder} was begun with: {PUT_BACK}.")
    return not any(
        lost_chunk(f"{job.folder}/{name}", stream["chunks"], checksums)
        for name, stream in streams.items()
    )


def _locked(target: Path) -> AcquireReturnProxy:
    """Keep other processes away from the folder. The lock ends with its process; its empty file stays."""
    target.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target / LOCK)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process is preparing {target}: waiting for it.")
        return lock.acquire()


@contextmanager
def _plain_errors(target: Path) -> Iterator[None]:
    kept = f"{KEPT}, repeat the command to go on"
    try:
        yield
    except UserError as error:  # names of files may hold line breaks
        raise UserError(without_control_codes(str(error))) from error
    except BrokenExecutor as error:
        memory = "perhaps for want of memory"
        raise UserError(
            f"A worker process was killed, {memory}: {kept} (with fewer workers if it recurs)."
        ) from error
    except OSError as error:
        said = f"{error.filename}: " * bool(error.filename) + (error.strerror or str(error))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            said = f"The disk of {target} is full: free some space"
        raise UserError(without_control_codes(f"{said}; {kept}.")) from error

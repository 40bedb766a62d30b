"""Prepares a corpus as a folder of token shards, in one run or after any number of interruptions.

    DIR/<split>/[<subset>/]   litdata chunks of documents, and their index
    DIR/tokenizer.json
    DIR/tasks/                plan.json, and a record of each task: files, hashes, what is left out
    DIR/manifest.json         what the shards hold and how they were made; written last

The same files and settings give the same shards, with any machine, workers and interruptions.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout

from anlit.config.labels import mapping
from anlit.data.preparation.executors import run_tasks
from anlit.data.preparation.folder_state import (
    LOCK,
    check_folder,
    check_sources,
    check_task,
    find_damage,
    times_sha256,
    write_times,
)
from anlit.data.preparation.formats import is_one_text
from anlit.data.preparation.hub import HubFiles
from anlit.data.preparation.plan import make_plan, settings_of
from anlit.data.preparation.publish import publish, read_records
from anlit.data.preparation.recipes import Recipe
from anlit.data.preparation.sources import (
    CHOOSE_TEXT,
    OTHER_FORMAT,
    CorpusFiles,
    DistinctTexts,
    LocalFiles,
    list_python_library,
)
from anlit.data.preparation.tasks import PROGRESS_KEPT, tasks_of
from anlit.data.round_trip import ChangeKind
from anlit.data.storage.manifest import CHANGES, MANIFEST, read_manifest
from anlit.errors import FULL_DISK_CODES, RunError, UserError
from anlit.io.cores import cores
from anlit.reporting.text import say, without_control_codes

LARGE_VAL_SHARE = 0.3
"""Share of the tokens in val, above which the user is told."""
CHANGE_EXPLANATIONS = {
    ChangeKind.NORMALISED: "in another Unicode normal form",
    ChangeKind.CHANGED: "as another text, so no bits per byte are reported for their split",
}
"""How a document comes back from its tokens, in a sentence."""


def prepare(
    path: str | Path,
    recipe: Recipe,
    command: str,
    workers: int | None = None,
    cluster: str | None = None,
    skip_bad: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Begin, continue or repair the prepared folder `path` of a recipe. Return its manifest.

    Args:
        command: the command that makes the folder, for the manifest and for later errors.
        workers: processes, by default one per core.
        cluster: address of a Dask scheduler. Its workers do the work instead.
        skip_bad: leave out documents that cannot be used, count and list them. Otherwise the first
            of them is an error.
        verify: compare the checksum of every chunk and every source file of a finished folder, not
            only sizes and times.

    Raises UserError if the folder holds something else, or a source or a document cannot be used.
    A full disk is a UserError too.
    """
    folder = Path(path)
    with _plain_errors(folder):
        source = open_source(recipe, folder)
        settings = settings_of(recipe, source)
        times = times_sha256(source.paths)
        if check_folder(folder, settings) and find_damage(folder, verify) is None:
            manifest = read_manifest(str(folder))
            check_sources(folder, recipe, source, manifest, times, verify)
            return manifest
        _refuse_links(folder)
        if not folder.exists():
            source.refuse_if_empty()
        with _locked(folder):
            if check_folder(folder, settings):
                damage = find_damage(folder, verify)
                if damage is None:  # another process was faster
                    return read_manifest(str(folder))
                say(f"{damage}: making again what is lost.")
                verify = True  # any chunk may be of another corpus
            plan, listing, job = make_plan(folder, recipe, source, settings, skip_bad)
            tasks = tasks_of(listing.files, recipe)
            done_tasks = {task: check_task(job, task, verify) for task in tasks}
            size = sum(task.size for task in tasks) / 1e6
            say(f"Preparing {recipe.corpus}: {len(listing.files):,} files, {size:,.1f} MB.")
            if other_formats := listing.skipped.get(OTHER_FORMAT):
                say(
                    f"{len(other_formats):,} files are left out, because they may be copies in "
                    f"another format; the first is {other_formats[0]}."
                )
            (folder / MANIFEST).unlink(missing_ok=True)  # until its end a repair is unfinished
            run_tasks(job, done_tasks, workers or cores(), cluster)
            write_times(folder, times)
            publish(job, plan, listing, read_records(folder, len(tasks)), command)
            manifest = read_manifest(str(folder))
            _say_result(folder, manifest)
            return manifest


def open_source(recipe: Recipe, folder: Path) -> CorpusFiles:
    """Return the source that a recipe describes.

    Its files may be gone if the prepared `folder` exists.
    """
    if recipe.python is not None:
        files = list_python_library(recipe.include_site_packages)
        return DistinctTexts(files, recipe.val_fraction, "*.py of this Python", may_skip=True)
    if recipe.source is None:
        assert recipe.repository is not None, "such a recipe requires --source"
        return HubFiles(recipe.repository, recipe.revision, recipe.layouts[0])
    if recipe.repository is not None:
        return LocalFiles(recipe.source, recipe.layouts)
    local = LocalFiles(recipe.source, recipe.layouts, CHOOSE_TEXT)
    if _is_a_text_each(recipe, local, folder):
        description = f"{recipe.pattern} in {recipe.source}"
        return DistinctTexts(local.paths, recipe.val_fraction, description)
    return local


def _is_a_text_each(recipe: Recipe, local: LocalFiles, folder: Path) -> bool:
    """Whether every file is a single document. If the files are gone, the manifest tells it."""
    if local.paths:
        return all(map(is_one_text, local.paths))
    if (folder / MANIFEST).is_file():
        return "val_fraction" in mapping(read_manifest(str(folder)).get("settings"))
    return is_one_text(recipe.pattern)


def _refuse_links(folder: Path) -> None:
    """Raise UserError if the folder has a symbolic link, which may lead to the user's own files."""
    for file in folder.rglob("*"):
        if file.is_symlink():
            raise UserError(
                f"{file} is a symbolic link, and nothing is written through one: remove that link"
            )


def _locked(folder: Path) -> AcquireReturnProxy:
    """Keep other processes away from the folder. The lock ends with its process. Its file stays."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process is preparing {folder}: waiting for it.")
        return lock.acquire()


def _say_result(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Say how many tokens and documents the folder has, and how many its tokens change."""
    tokens = []
    for split in manifest["splits"]:
        tokens.append(f"{manifest[split]['tokens']:,} tokens in {split}")
    documents = f"{manifest['documents']:,} documents, {_skipped_in_words(manifest['skipped'])}"
    say(f"{folder}: {', '.join(tokens)}; {documents}.")
    share = manifest["val"]["tokens"] / max(1, manifest["tokens"])
    if share > LARGE_VAL_SHARE:
        say(f"{folder}: val has {share:.0%} of the tokens, because documents are held out whole.")
    for kind, count in manifest.get(CHANGES, {}).items():
        say(
            f"{folder}: {count:,} of {manifest['documents']:,} documents come back from their "
            f"tokens {CHANGE_EXPLANATIONS[kind]}."
        )


def _skipped_in_words(skipped: Mapping[str, Any]) -> str:
    """`2 skipped (not_utf8: 2, such as a.txt)`, from a manifest's `skipped`."""
    n_skipped = sum(entry["count"] for entry in skipped.values())
    reasons = []
    for reason, entry in skipped.items():
        example = f", such as {entry['listed'][0]}" if entry["listed"] else ""
        reasons.append(f"{reason}: {entry['count']:,}{example}")
    details = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{n_skipped:,} skipped{details}"


@contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the system and of workers into UserError, without names' line breaks.

    A full disk and a killed worker are a RunError.
    """
    repeat = f"{PROGRESS_KEPT}, repeat the command to go on"
    try:
        yield
    except UserError as error:
        raise type(error)(without_control_codes(str(error))) from error
    except BrokenExecutor as error:
        raise RunError(
            f"A worker process was killed, perhaps for want of memory: {repeat}, "
            "with fewer workers if it recurs"
        ) from error
    except OSError as error:
        problem = error.strerror or str(error)
        if error.filename:
            problem = f"{error.filename}: {problem}"
        kind = UserError
        if error.errno in FULL_DISK_CODES:
            problem = f"The disk of {folder} is full: free some space"
            kind = RunError
        raise kind(without_control_codes(f"{problem}; {repeat}")) from error

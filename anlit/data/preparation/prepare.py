"""Prepares a corpus as a folder of token shards, in one run or after any number of interruptions.

    DIR/<split>/[<subset>/]   litdata chunks and their index: documents, each with its end-of-document token
    DIR/tokenizer.json
    DIR/sources.jsonl         for each group of source files: their hashes and counts, what was skipped, the chunks made
    DIR/manifest.json         what the shards hold and how they were made; written last
    DIR/.work/                only while it is not finished

The same files and settings give the same bytes, whatever the machine, the workers, the nodes and the interruptions.
"""

import errno
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.encode import Job
from anlit.data.preparation.plan import Plan, current_settings, make_plan, refuse_differences
from anlit.data.preparation.publish import publish
from anlit.data.preparation.recipe import GPT2_END_OF_DOCUMENT, GPT2_VOCABULARY, NO_TOKENIZER, Recipe
from anlit.data.preparation.repair import Damage, begin_repair, find_damage, reopen
from anlit.data.preparation.runner import Runner, all_groups_done
from anlit.data.preparation.tokenizer import provide_tokenizer
from anlit.data.preparation.workspace import LOCK, Workspace
from anlit.data.storage.manifest import MANIFEST, WORK, read_manifest
from anlit.errors import UserError
from anlit.reporting.provenance import cores
from anlit.reporting.text import say, visible


@dataclass(frozen=True)
class RunOptions:
    """How to prepare: nothing here changes what the shards hold."""

    workers: int | None = None
    """Processes; by default one for each core this process may use."""
    shard: int = 0
    shards: int = 1
    """This process does part `shard` of `shards`, the others are done by others on the same folder."""
    skip_bad: bool = False
    """Leave out documents that cannot be used, count and list them; otherwise the first one stops the preparation."""
    verify: bool = False
    """Compare the checksum of every chunk of a finished folder, not only its size."""
    command: str = ""
    """The command that makes the folder, for the manifest and the errors of those who read it."""


def prepare(path: str | Path, recipe: Recipe, options: RunOptions | None = None) -> dict[str, Any] | None:
    """Make `path` the prepared folder of `recipe`: begin, continue or repair it, unless it is finished.

    Returns:
        The manifest; None if other shards' processes still have to do their part.

    Raises:
        UserError: the folder holds something else; a source or a document cannot be used; the disk is full.
    """
    options = options or RunOptions()
    target = Path(path)
    workspace = Workspace(target)
    with _plain_errors(target):
        manifest = _finished(target, recipe, options)
        if isinstance(manifest, dict) and not workspace.root.is_dir():
            return manifest
        with workspace.shard_lock(options.shard, options.shards):
            begun = _begin(workspace, recipe, options)
            if isinstance(begun, dict):
                return begun
            begun.run()
            return _end(workspace, recipe, options, begun)


def _finished(target: Path, recipe: Recipe, options: RunOptions) -> dict[str, Any] | Damage | None:
    """The manifest of a finished folder, or its damage; None for an unfinished folder.

    Raises:
        UserError: it is a folder of something else, or made with other settings.
    """
    if not (target / MANIFEST).is_file():
        _refuse_foreign(target)
        return None
    manifest = read_manifest(str(target))
    refuse_differences(target, manifest["settings"], current_settings(recipe))
    return find_damage(target, manifest, options.verify) or manifest


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file: choose a folder with --output, or --data.path.")
    if target.is_dir() and not (target / WORK).is_dir():
        foreign = [path for path in sorted(target.iterdir()) if not path.name.startswith(LOCK)]
        if foreign:
            raise UserError(
                f"{target} is not a prepared folder, it has no {MANIFEST} but {foreign[0].name}: "
                "choose a new one with --output, or --data.path."
            )


def _begin(workspace: Workspace, recipe: Recipe, options: RunOptions) -> Runner | dict[str, Any]:
    """Plan what there is to do, or find that there is nothing. One process at a time does this, or `_end`."""
    with workspace.lock("folder"):
        finished = _finished(workspace.target, recipe, options)
        if isinstance(finished, dict):
            workspace.remove()  # a process was killed between its last two steps
            return finished
        unplanned = finished is not None or not workspace.plan.is_file()
        try:
            if finished is not None:
                first, n_groups = finished.paths[0], len(finished.groups)
                say(f"{first} is missing or damaged ({len(finished.paths)} in all): making {n_groups} group(s) again.")
                begin_repair(workspace, recipe, finished)
            workspace.make()
            plan = make_plan(workspace, recipe)
            job = _job(workspace, recipe, plan, options)
            if finished is not None:
                reopen(workspace, finished)
        except UserError:
            if unplanned:  # the command is wrong, and must not stand in the way of the right one
                workspace.forget_plan()
            raise
        say(f"Preparing {recipe.corpus}: {len(plan.files):,} files, {plan.size / 1e6:,.1f} MB.")
        return Runner(job, plan, recipe, options.workers or cores(), options.shard, options.shards)


def _end(workspace: Workspace, recipe: Recipe, options: RunOptions, runner: Runner) -> dict[str, Any] | None:
    """Publish what all shards have made, if none is left to do."""
    with workspace.lock("folder"):
        if (workspace.target / MANIFEST).is_file():  # another shard ended last
            workspace.remove()
            return read_manifest(str(workspace.target))
        if not all_groups_done(runner.job, runner.plan):
            part = f"Shard {options.shard} of {options.shards}"
            say(f"{part} is done; whoever ends last writes {workspace.target / MANIFEST}.")
            return None
        token_at = "start" if recipe.tokenized else "end"
        manifest = publish(runner.job, runner.plan, recipe.corpus, options.command, token_at)
        workspace.remove()
    parts = [f"{manifest[split]['tokens']:,} tokens in {split}" for split in manifest["splits"]]
    skipped = sum(reason["count"] for reason in manifest["skipped"].values())
    say(f"{workspace.target}: {', '.join(parts)}; {manifest['documents']:,} documents, {skipped:,} skipped.")
    return manifest


def _job(workspace: Workspace, recipe: Recipe, plan: Plan, options: RunOptions) -> Job:
    """What all tasks have in common. The tokenizer is fetched, copied or trained here, once."""
    if recipe.tokenizer == NO_TOKENIZER:
        if not recipe.tokenized:
            raise UserError("--tokenizer none is for files that hold tokens already: choose gpt2, gpt-neox or a file.")
        vocab_size, end_of_document = GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT
    else:
        provide_tokenizer(workspace, recipe, plan)
        tokenizer = tokenizers.load_tokenizer(workspace.tokenizer)
        vocab_size = tokenizers.vocabulary_size(tokenizer)
        end_of_document = tokenizers.end_of_document_id(tokenizer, recipe.end_of_document)
    return Job(
        workspace=workspace,
        columns=recipe.columns,
        splits=recipe.splits,
        tokenizer=None if recipe.tokenized else workspace.tokenizer,
        vocab_size=vocab_size,
        end_of_document=end_of_document,
        skip_bad=options.skip_bad,
        chunk_bytes=recipe.chunk_bytes,
    )


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

"""The choice of held-out texts by a rule that compares all texts: it reads the corpus once before encoding.

Reading and hashing took 0.8 % of a preparation's processor time (30 MB of Python sources, one process). A corpus from
the hub is fetched for it, and its files stay in .work/source until they are encoded.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anlit.data.preparation.files import FileState, SourceFile, bad_document, file_sha256, refuse_changed, state_of
from anlit.data.preparation.formats import Columns, Span, format_of
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.splits import HeldOutTexts
from anlit.data.preparation.workers import worker_pool
from anlit.data.preparation.workspace import Workspace, say

Hashes = tuple[np.ndarray, np.ndarray]
"""Of the usable records of a stretch: their numbers in the file, (n,) int64, and their texts' hashes, (n,) uint64."""


class Chosen(NamedTuple):
    """What the rule says about each file; files without such records are left out."""

    held_out: dict[str, list[int]]
    """Numbers of the records that are held out, each text once."""
    left_out: dict[str, list[int]]
    """Numbers of the records that repeat a held-out text."""
    copies: int
    """Records whose text an earlier one has, in all."""


def choose_texts(
    workspace: Workspace, recipe: Recipe, files: Sequence[SourceFile], workers: int, skip_bad: bool
) -> tuple[Chosen, list[SourceFile]]:
    """Read all texts and apply the recipe's rule.

    Returns:
        What it says, and the files with the hashes of what was read, which encoding has to find again.

    Raises:
        UserError: there are too few texts, or a file cannot be had or changes meanwhile, or a document cannot be used
            and such are not to be skipped.
        OSError: a file cannot be read.
    """
    rule = recipe.splits
    assert isinstance(rule, HeldOutTexts)
    size = sum(file.size for file in files)
    say(f"Reading {len(files):,} files, {size / 1e6:,.1f} MB, to choose the texts that are held out.")
    parts: list[list[Future[Hashes]]] = []
    digests: list[Future[str]] = []
    with worker_pool(min(workers, size // recipe.task_bytes)) as pool:
        try:
            for file in files:
                path = recipe.source.provide(file, workspace.source)
                state = state_of(path)
                spans = format_of(file.name).spans(path, recipe.task_bytes)
                work = (file.name, path, state)
                parts.append([pool.submit(_hashes, *work, span, recipe.columns, rule, skip_bad) for span in spans])
                digests.append(pool.submit(_sha256, path, state))
            found = [[part.result() for part in file_parts] for file_parts in parts]
            read = [replace(file, sha256=digest.result()) for file, digest in zip(files, digests, strict=True)]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    numbers = [np.concatenate([part[0] for part in file_parts]) for file_parts in found]
    hashes = np.concatenate([part[1] for file_parts in found for part in file_parts])
    held_out, left_out, copies = rule.choose(hashes)
    names, ends = [file.name for file in files], np.cumsum([len(part) for part in numbers])
    records = np.concatenate(numbers)
    return Chosen(_by_file(held_out, records, ends, names), _by_file(left_out, records, ends, names), copies), read


def _by_file(positions: np.ndarray, records: np.ndarray, ends: np.ndarray, names: list[str]) -> dict[str, list[int]]:
    """Positions among all records as numbers in their files."""
    positions = np.sort(positions)
    parts = np.split(positions, np.searchsorted(positions, ends)[:-1])
    return {name: records[part].tolist() for name, part in zip(names, parts, strict=True) if len(part)}


def _hashes(
    name: str, path: Path, state: FileState, span: Span, columns: Columns, rule: HeldOutTexts, skip_bad: bool
) -> Hashes:
    """Runs in a worker."""
    numbers, hashes = [], []
    for record in format_of(name).read(path, span, columns):
        if record.text is not None:
            numbers.append(record.index)
            hashes.append(rule.hash_of(record.text))
        elif not skip_bad:
            raise bad_document(path, record.where, record.detail)
    refuse_changed(path, state)
    return np.array(numbers, dtype=np.int64), np.array(hashes, dtype=np.uint64)


def _sha256(path: Path, state: FileState) -> str:
    """Runs in a worker."""
    digest = file_sha256(path)
    refuse_changed(path, state)
    return digest

"""A corpus of local text files, each different one a document: the user's own folders, the embedded corpus.

The files are read once beforehand: what is not text is left out, copies are dropped, and the documents are put in
the order of their content hashes, which is a shuffled order and the same wherever the files lie.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from anlit.data.preparation.sources import Listing, Source, SourceFile, names_and_sizes_sha256
from anlit.data.preparation.splits import checked_fraction, is_held_out
from anlit.data.storage.manifest import TRAIN, VAL
from anlit.errors import UserError


def list_files(root: Path, pattern: str) -> dict[str, Path]:
    """Files under `root` that match a glob pattern, by their names below it, sorted."""
    return {path.relative_to(root).as_posix(): path for path in sorted(root.glob(pattern)) if path.is_file()}


class DistinctTexts(Source):
    """Every different UTF-8 file of a list, held out or not by a hash of its content.

    Args:
        find: gives the files, by labels that do not depend on where the corpus lies; called only when needed.
        val_fraction: part of the documents that is held out for validation, in (0, 1).
        nothing: the error about a corpus without any files.
    """

    def __init__(self, find: Callable[[], dict[str, Path]], val_fraction: float, nothing: str) -> None:
        self.find, self.val_fraction, self.nothing = find, checked_fraction(val_fraction), nothing

    @cached_property
    def texts(self) -> dict[str, Path]:
        """Label → path."""
        return self.find()

    def listing(self) -> Listing:
        if not self.texts:
            raise UserError(self.nothing)
        skipped: dict[str, list[str]] = {}
        seen: dict[str, SourceFile] = {}
        for label, path in self.texts.items():
            problem, content = _read(path)
            sha256 = hashlib.sha256(content).hexdigest()
            if problem is None and sha256 in seen:
                problem = "duplicate"
            if problem is not None:
                skipped.setdefault(problem, []).append(label)
            else:
                seen[sha256] = SourceFile(label, len(content), sha256)
        return Listing(self._split([seen[sha256] for sha256 in sorted(seen)]), skipped)

    def _split(self, files: list[SourceFile]) -> list[SourceFile]:
        """The held-out files first, then the others."""
        if len(files) < 2:
            raise UserError(
                f"The corpus has {len(files)} different non-empty UTF-8 file(s) out of {len(self.texts)}, and "
                "training and validation need one each: point the source at more text or widen the pattern."
            )
        val = [file for file in files if is_held_out(str(file.sha256), self.val_fraction)]
        # A handful of files may all fall on one side; the smallest and largest hash still go apart.
        val = (val or files[:1])[: len(files) - 1]
        held_out = {file.name for file in val}
        return [replace(file, split=VAL) for file in val] + [
            replace(file, split=TRAIN) for file in files if file.name not in held_out
        ]

    def listing_sha256(self) -> str | None:
        if not self.texts:
            return None
        return names_and_sizes_sha256([SourceFile(label, path.stat().st_size) for label, path in self.texts.items()])

    def provide(self, file: SourceFile, folder: Path) -> Path:
        """The file where it lies.

        Raises:
            UserError: it is not what it was when the corpus was listed.
        """
        path = self.texts.get(file.name)
        if path is None or hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
            raise UserError(
                f"{path or file.name} has changed since the preparation began: remove the unfinished folder and "
                "repeat the command while the texts stay as they are."
            )
        return path

    def settings(self) -> dict[str, Any]:
        return {"val_fraction": self.val_fraction}


def _read(path: Path) -> tuple[str | None, bytes]:
    """The reason to leave a file out, and what is in it."""
    try:
        content = path.read_bytes()
        return None if content.decode() else "empty", content
    except OSError:
        return "unreadable", b""
    except UnicodeDecodeError:
        return "not_utf8", b""

"""Which documents a corpus of local files has, and which of them are held out."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from anlit.errors import UserError


@dataclass(frozen=True)
class SourceFile:
    """A file that may become a document; `label` names it apart from where the corpus lies."""

    label: str
    path: Path


@dataclass(frozen=True)
class Document:
    """A file that is one: valid UTF-8, not empty, not the copy of another."""

    label: str
    path: Path
    size: int
    sha256: str

    def text(self) -> str:
        """The file's text.

        Raises:
            ValueError: it is not what it was when it was examined.
        """
        content = self.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ValueError(f"{self.path} has changed since the preparation began.")
        return content.decode("utf-8")


@dataclass
class Documents:
    """The two parts of a corpus, each in the order of its content hashes, and what was left out."""

    train: list[Document] = field(default_factory=list)
    val: list[Document] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def content_sha256(self) -> str:
        """One hash over all documents: the same texts give the same one, in whatever files they lie."""
        hashes = sorted(document.sha256 for document in self.train + self.val)
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def listing_sha256(files: list[SourceFile]) -> str:
    """Hash over names and sizes: a cheap sign of a corpus that has changed since it was prepared."""
    lines = sorted(f"{file.label}\t{file.path.stat().st_size}" for file in files)
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def list_files(root: Path, pattern: str) -> list[SourceFile]:
    """Files under `root` that match a glob pattern, sorted by name."""
    return [
        SourceFile(path.relative_to(root).as_posix(), path) for path in sorted(root.glob(pattern)) if path.is_file()
    ]


def is_held_out(sha256: str, val_fraction: float) -> bool:
    """Whether a document belongs to validation, by nothing but its content.

    So it stays on its side when files are added, renamed or copied.
    """
    return int(sha256[:8], 16) < val_fraction * 2**32


def collect(files: list[SourceFile], val_fraction: float) -> Documents:
    """Read every file once: leave out what is not text, drop copies, split by content.

    Raises:
        UserError: nothing is left, or too little for two parts.
    """
    result = Documents(skipped={"unreadable": [], "not_utf8": [], "empty": [], "duplicate": []})
    seen: dict[str, Document] = {}
    for file in files:
        reason, document = _examine(file)
        if document is not None and document.sha256 in seen:
            reason = "duplicate"
        if reason is not None:
            result.skipped[reason].append(file.label)
        elif document is not None:
            seen[document.sha256] = document
    ordered = [seen[sha256] for sha256 in sorted(seen)]
    if len(ordered) < 2:
        raise UserError(
            f"The corpus has {len(ordered)} different non-empty UTF-8 file(s) out of {len(files)}, and training "
            "and validation need one each: point --data.source at more text or widen --data.pattern."
        )
    result.val = [document for document in ordered if is_held_out(document.sha256, val_fraction)]
    # A handful of files may all fall on one side; the smallest and largest hash still go apart.
    result.val = result.val or ordered[:1]
    result.val = result.val[: len(ordered) - 1]
    result.train = ordered[len(result.val) :]
    return result


def _examine(file: SourceFile) -> tuple[str | None, Document | None]:
    """The reason to skip a file, or the document in it."""
    try:
        content = file.path.read_bytes()
    except OSError:
        return "unreadable", None
    if not content:
        return "empty", None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "not_utf8", None
    return None, Document(file.label, file.path, len(content), hashlib.sha256(content).hexdigest())


def texts(documents: list[Document], limit: int) -> Iterator[str]:
    """The documents' texts until `limit` bytes have been given."""
    given = 0
    for document in documents:
        if given >= limit:
            return
        given += document.size
        yield document.text()

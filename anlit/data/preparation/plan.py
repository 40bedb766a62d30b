"""The plan of a preparation: files → groups (whose chunks are written together) → tasks (encoded by one worker).

It depends on the files alone, not on workers, nodes or interruptions, and therefore neither do the shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anlit.data.preparation.formats import Span, format_of, read_bin_header
from anlit.data.preparation.recipe import Recipe
from anlit.data.preparation.sources import FileState, SourceFile
from anlit.data.preparation.workspace import Workspace, read_json
from anlit.data.storage.manifest import MANIFEST
from anlit.errors import UserError
from anlit.reporting.files import write_json
from anlit.reporting.text import say

TOKENS_AT_ONCE = 1 << 22  # of a .bin file


class FoundFile(NamedTuple):
    """A source file on this machine."""

    path: Path
    state: FileState
    """Before its hash was taken."""


@dataclass(frozen=True)
class Piece:
    """A stretch of one source file."""

    name: str
    path: Path
    state: FileState
    """Of the file, which has to be the same after the stretch has been read."""
    span: Span
    split: str


@dataclass(frozen=True)
class Task:
    """What a worker encodes at once."""

    group: int
    number: int
    pieces: tuple[Piece, ...]
    size: int
    """Its share of the source files' bytes, for the progress bar."""

    @property
    def is_first(self) -> bool:
        """Whether it begins the corpus."""
        return self.group == self.number == 0


@dataclass(frozen=True)
class Plan:
    """The corpus's files in their order, and what is known about them before they are read."""

    settings: dict[str, Any]
    files: list[SourceFile]
    skipped: dict[str, list[str]]
    pinned: dict[str, Any]
    """What the source keeps to, such as the hub's commit."""
    groups: list[range]
    """Which files make up each group."""

    @property
    def size(self) -> int:
        """Bytes of all source files."""
        return sum(file.size for file in self.files)

    def group_size(self, group: int) -> int:
        return sum(self.files[number].size for number in self.groups[group])


def make_plan(workspace: Workspace, recipe: Recipe) -> Plan:
    """The plan of an earlier, unfinished preparation, or a new one, written down before anything else is done.

    An earlier one with other settings is forgotten if little is lost by it: the first command was a mistake.

    Raises:
        UserError: the earlier preparation had other settings or files.
    """
    settings = current_settings(recipe)
    begun_with = read_json(workspace.plan)["settings"] if workspace.plan.is_file() else settings
    if differences(begun_with, settings) and workspace.may_be_forgotten():
        say("The settings are others than those that were begun with, and nothing is lost: beginning anew.")
        workspace.start_over()
        workspace.make()
    if not workspace.plan.is_file():
        write_json(workspace.plan, _new_plan(recipe, settings))
    content = read_json(workspace.plan)
    refuse_differences(workspace.target, content["settings"], settings)
    recipe.source.pin(content["pinned"])
    return _plan(content)


def _new_plan(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    listing = recipe.source.listing()
    recipe.splits.check([file.name for file in listing.files if file.split is None])
    return {
        "settings": settings,
        "pinned": recipe.source.pinned(),
        "files": [asdict(file) for file in listing.files],
        "skipped": listing.skipped,
    }


def current_settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's settings, with the hash of its files' names and sizes if they are at hand."""
    listing = recipe.source.listing_sha256()
    return {**recipe.settings(), **({"listing_sha256": listing} if listing else {})}


def _plan(content: dict[str, Any]) -> Plan:
    files = [SourceFile(**file) for file in content["files"]]
    groups = list(_groups(files, content["settings"]["group_bytes"]))
    return Plan(content["settings"], files, content["skipped"], content["pinned"], groups)


def _groups(files: Sequence[SourceFile], group_bytes: int) -> Iterator[range]:
    """Consecutive files of at least `group_bytes` together; the last group may be smaller."""
    first, size = 0, 0
    for number, file in enumerate(files):
        size += file.size
        if size >= group_bytes:
            yield range(first, number + 1)
            first, size = number + 1, 0
    if first < len(files):
        yield range(first, len(files))


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed in the settings; what is not known now (the listing of files not at hand) is not compared."""
    return [
        "names or sizes of the source files" if key == "listing_sha256" else f"{key} {then.get(key)} → {now[key]}"
        for key in sorted(now)
        if then.get(key) != now[key]
    ]


def refuse_differences(target: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise UserError if the settings of an existing folder differ from those that are asked for."""
    if differs := differences(then, now):
        what = f"with other settings or files ({', '.join(differs)}): remove the folder, or choose another (--output,"
        if not (target / MANIFEST).is_file():
            raise UserError(f"The preparation of {target} was begun {what} or --data.path).")
        raise UserError(f"{target} was prepared {what} or --data.path), or read it as it is with --data TokenShards.")


def tasks_of(plan: Plan, recipe: Recipe, group: int, found: dict[str, FoundFile]) -> list[Task]:
    """The group's tasks.

    Args:
        found: the group's files on this machine, by their names.
    """
    tasks: list[Task] = []
    pieces: list[Piece] = []
    size = 0
    for piece, share in _pieces(plan, recipe, group, found):
        pieces.append(piece)
        size += share
        if size >= recipe.task_bytes:
            tasks.append(Task(group, len(tasks), tuple(pieces), size))
            pieces, size = [], 0
    if pieces:
        tasks.append(Task(group, len(tasks), tuple(pieces), size))
    return tasks


def _pieces(plan: Plan, recipe: Recipe, group: int, found: dict[str, FoundFile]) -> Iterator[tuple[Piece, int]]:
    """Each piece with its share of its file's bytes."""
    for file in (plan.files[number] for number in plan.groups[group]):
        path, state = found[file.name]
        split = file.split or recipe.splits.of_file(file.name)
        spans = token_spans(path) if recipe.tokenized else format_of(file.name).spans(path, recipe.task_bytes)
        for span in spans:
            yield Piece(file.name, path, state, span, split), file.size // len(spans)


def token_spans(path: Path) -> list[Span]:
    """Stretches of a .bin file, in tokens.

    Raises:
        UserError: it is not such a file.
    """
    n_tokens = read_bin_header(path)
    return [
        Span(start, min(start + TOKENS_AT_ONCE, n_tokens), first_record=0)
        for start in range(0, n_tokens, TOKENS_AT_ONCE)
    ]

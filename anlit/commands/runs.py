"""`anlit runs`: a table of all runs below a folder."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.cells import cell_len

from anlit.config.names import split_tags
from anlit.config.options import ToolParser
from anlit.reporting.table import NONE, Table, console
from anlit.reporting.text import count_of, echo, json_line, short_number
from anlit.runs.folders import find_runs
from anlit.runs.overview import SORT_KEYS, Overview, read_overviews, sort_overviews

DEFAULT_FOLDER = "runs"
WIDE = 110
"""Characters from which on all columns have room."""
LEFT_OUT_IF_NARROW = ("folder", "tokens", "last\nrate", "tokens\na second", "age")
"""Columns that a terminal below `WIDE` does not show."""
LONGEST_IF_NARROW = {"run": 18, "tags": 11, "changes": 11}
"""Characters of a cell in a narrow terminal, which shows the end of a folder. Changes take all the
room that other columns leave."""
LEFT_ALIGNED = ("run", "folder", "state", "tags", "changes")
"""Columns of text; numbers are aligned right."""
MOST_CHANGES = 4
"""Changes in a cell; --json has all."""
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
"""Seconds in a unit of age, largest first."""


def parser() -> ToolParser:
    parser = ToolParser(
        prog="anlit runs",
        description="Lists all runs below a folder: how far each is, its losses, its speed, "
        "and the settings that differ from the value that most runs have.",
        epilog="Example: anlit runs runs/sweep --sort val_loss",
    )
    add = parser.add_argument
    add(
        "folder",
        nargs="*",
        metavar="FOLDER",
        default=[DEFAULT_FOLDER],
        help=f"folders that hold run folders, at any depth ({DEFAULT_FOLDER})",
    )
    add(
        "--sort",
        choices=SORT_KEYS,
        metavar="COLUMN",
        default="name",
        help=f"sort by a column, ascending (name): {', '.join(SORT_KEYS)}",
    )
    add(
        "--tag",
        action="append",
        default=[],
        metavar="TAG",
        help="only the runs with this tag; several, as --tag a --tag b or a,b: with all of them",
    )
    add("--json", action="store_true", help="one line of JSON for each run, with exact numbers")
    return parser


def main(argv: list[str]) -> None:
    options = parser().parse_args(argv)
    folders = find_runs([str(Path(folder)) for folder in options.folder])
    tags = split_tags(options.tag) or []
    overviews = sort_overviews(read_overviews(folders, tags), options.sort)
    if options.json:
        for overview in overviews:
            echo(json_line(asdict(overview)))
    else:
        terminal = console()
        terminal.print(table_of(overviews, terminal.width))
    for overview in overviews:
        if overview.fault:
            echo(f"warning: {overview.fault}", sys.stderr)


def table_of(overviews: list[Overview], width: int) -> Table:
    """Return the table of the runs. Columns without any value are left out."""
    is_narrow = width < WIDE
    left_out = LEFT_OUT_IF_NARROW if is_narrow else ()
    columns = {"run": names_of(overviews)}
    for heading, cell in CELLS.items():
        columns[heading] = [cell(overview) for overview in overviews]
    if columns["folder"] == columns["run"]:
        columns.pop("folder")
    shown: dict[str, list[str]] = {}
    for heading, cells in columns.items():
        if heading in left_out or set(cells) == {NONE}:
            continue
        if is_narrow and heading in LONGEST_IF_NARROW:
            length = LONGEST_IF_NARROW[heading]
            if heading == "changes":
                length = max(length, width - 2 - _width_of(shown))
            cells = [shortened(text, length, heading == "run") for text in cells]
        shown[heading] = cells
    left = [number for number, heading in enumerate(shown) if heading in LEFT_ALIGNED]
    rows = list(zip(*shown.values(), strict=True))
    return Table(count_of(len(overviews), "run"), list(shown), rows, left)


def _width_of(columns: dict[str, list[str]]) -> int:
    """Return the characters of a line of the table, each column with two spaces after it."""
    total = 0
    for heading, cells in columns.items():
        total += max(map(cell_len, [*heading.split("\n"), *cells])) + 2
    return total


def names_of(overviews: list[Overview]) -> list[str]:
    """The name of each run, or its folder if another run has the name."""
    counts = Counter(overview.name for overview in overviews)
    names = []
    for overview in overviews:
        names.append(overview.name if counts[overview.name] == 1 else overview.folder)
    return names


def steps_of(overview: Overview) -> str:
    """`40/200`, or `40` if the configuration has no number of steps."""
    if overview.step is None:
        return NONE
    if overview.steps is None:
        return f"{overview.step:,}"
    return f"{overview.step:,}/{overview.steps:,}"


def state_of(overview: Overview) -> str:
    return f"{overview.state}, damaged" if overview.fault else overview.state


def shortened(text: str, length: int, keeps_end: bool) -> str:
    """Return the text in at most `length` characters, with an ellipsis for the rest."""
    if len(text) <= length:
        return text
    return f"…{text[1 - length :]}" if keeps_end else f"{text[: length - 1]}…"


def changes_of(overview: Overview) -> str:
    """The first changes, and an ellipsis if there are more."""
    changes = list(overview.changes[:MOST_CHANGES])
    if len(overview.changes) > MOST_CHANGES:
        changes.append("…")
    return ", ".join(changes) or NONE


def age_in_words(seconds: float | None) -> str:
    """`3 h`, in the largest unit that it reaches."""
    if seconds is None:
        return NONE
    size, unit = next((pair for pair in UNITS if seconds >= pair[0]), UNITS[-1])
    return f"{seconds / size:.0f} {unit}"


def loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def short(value: float | None) -> str:
    return NONE if value is None else short_number(value)


CELLS: dict[str, Callable[[Overview], str]] = {
    "folder": lambda overview: overview.folder,
    "state": state_of,
    "step": steps_of,
    "tokens": lambda overview: short(overview.tokens),
    "train\nloss": lambda overview: loss(overview.train_loss),
    "val\nloss": lambda overview: loss(overview.val_loss),
    "last\nrate": lambda overview: short(overview.rate),
    "tokens\na second": lambda overview: short(overview.tokens_per_second),
    "age": lambda overview: age_in_words(overview.age),
    "tags": lambda overview: ", ".join(overview.tags) or NONE,
    "changes": changes_of,
}
"""Heading of a column → what a run has in it. The names of the runs come first."""

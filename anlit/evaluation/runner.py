"""What every evaluation does: load checkpoints and their data, measure each, write JSON, a page, pictures and a table.

Page, pictures and table are functions of the JSON alone. So an evaluation that is given the JSON file of an earlier one
writes them again, without any model.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure
from rich.progress import Progress

from anlit.checkpoints.loading import Checkpoint, device_name, find_device, load_checkpoint
from anlit.configuration import mapping
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.arms import Candidate, load_candidates
from anlit.evaluation.data import data_of
from anlit.evaluation.settings import Settings
from anlit.reporting.figure import save, style
from anlit.reporting.files import jsonable, output_folder, write_json, writing
from anlit.reporting.page import write_page
from anlit.reporting.provenance import environment
from anlit.reporting.table import Table, console
from anlit.reporting.text import code, literal

Tell = Callable[[float, str], None]
"""Takes the share of a checkpoint's work that was done since the last call, and a line to print or an empty one."""


@dataclass(frozen=True, eq=False)
class Report:
    """What an evaluation shows of its record."""

    table: Table
    """The main numbers."""
    parts: list[str]
    """The page in Markdown, without the provenance."""
    figures: Mapping[str, Callable[[], Figure]]
    """The pictures by their files' names."""
    notes: Sequence[str] = field(default=())
    """Sentences to print below the table."""


class Evaluation(ABC):
    """One kind of evaluation.

    Args:
        settings: How to measure.
    """

    name: ClassVar[str]
    """Of the command and of NAME.json."""
    page: ClassVar[str] = "report"
    digits: ClassVar[int | None] = None
    """Significant digits in the record; None for all."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def plan(self, candidates: list[Candidate]) -> dict[str, Any]:
        """Decide what to measure, the same for all checkpoints; returns what the record adds to the settings.

        Raises:
            UserError: It cannot be measured on these data.
        """
        return {}

    @abstractmethod
    def measure(self, checkpoint: Checkpoint, data: TokenShards, tell: Tell) -> Any:
        """The measurements of one checkpoint."""

    @abstractmethod
    def record(self, candidates: list[Candidate], measurements: list[Any]) -> dict[str, Any]:
        """The measurements in the record, and what follows from them."""

    @abstractmethod
    def report(self, record: dict[str, Any]) -> Report:
        """What to show of a record, as it is read from JSON."""


def evaluate(evaluation: Evaluation, paths: Sequence[str], output: str, command: str = "") -> dict[str, Any]:
    """Measure the checkpoints `paths`, write the results into the folder `output` and print the table.

    Args:
        paths: Run folders or checkpoints; or the JSON file of an earlier evaluation, which is only shown again.
        output: The folder; made where missing.
        command: What the user typed.

    Returns:
        The content of the JSON file.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong, if possible before anything is measured; or the folder
            cannot be written.
    """
    folder = output_folder(output)
    if len(paths) == 1 and paths[0].endswith(".json"):
        record = _read(Path(paths[0]), evaluation.name)
    else:
        record = keep(_measured(evaluation, paths, command), folder, evaluation.name, evaluation.digits)
    publish(record, evaluation.report, folder, evaluation.page)
    return record


def keep(record: dict[str, Any], folder: Path, name: str, digits: int | None = None) -> dict[str, Any]:
    """Write a record as NAME.json, with so many significant digits; returns the content of the file.

    Raises:
        UserError: The folder cannot be written.
    """
    content: dict[str, Any] = jsonable(record, digits)
    with writing(folder):
        write_json(folder / f"{name}.json", content)
    return content


def publish(record: dict[str, Any], report_of: Callable[[dict[str, Any]], Report], folder: Path, page: str) -> None:
    """Print the table of a record, and write its page and pictures into `folder`.

    Raises:
        UserError: The folder cannot be written, or the record is of another evaluation.
    """
    try:
        report = report_of(record)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(f"The record is damaged or of another evaluation ({error!r}): evaluate again") from error
    screen = console()
    screen.print(report.table)
    for note in report.notes:
        screen.print(note)
    with writing(folder):
        for file, draw in report.figures.items():
            with style(8):
                save(draw(), folder / file)
        written = write_page(folder, page, [*report.parts, "## Where the numbers come from", provenance(record)])
    screen.print(f"Report: {written}", markup=False, highlight=False, soft_wrap=True)


def header(command: str) -> dict[str, Any]:
    """The beginning of a record: command, time, commit, versions, hardware; device, checkpoints and data are unknown.

    Call it before measuring, because it records the load of the machine.
    """
    return {"command": command, **environment(), "device": None, "checkpoints": [], "data": None}


def provenance(record: dict[str, Any]) -> str:
    """The header of a record as a list in Markdown, for the end of a report."""
    git = record["git"]
    commit = (git["commit"] + (" (with changes)" if git["dirty"] else "")) if git else "not recorded"
    data = record["data"] or {}
    machine = f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores; device {record['device']}"
    lines = [
        f"- command: {code(record['command'])}",
        f"- commit: {commit}, {record['when']}",
        f"- hardware: {literal(machine)}",
        "- versions: " + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if data:
        content = str(data["content_sha256"])[:12]
        lines.append(f"- data: {literal(str(data['corpus']))}, {code(str(data['path']))}, content {content}")
    lines += [f"- {literal(own['label'])}: {code(own['file'])}, step {own['step']:,}" for own in record["checkpoints"]]
    return "\n".join(lines)


def _measured(evaluation: Evaluation, paths: Sequence[str], command: str) -> dict[str, Any]:
    record, settings = header(command), evaluation.settings
    device = find_device(settings.device)
    candidates = load_candidates(paths, settings.data)
    record |= {
        "device": device_name(device),
        "checkpoints": [candidate.description for candidate in candidates],
        "data": candidates[0].data.fingerprint,
        "settings": asdict(settings) | evaluation.plan(candidates),
    }
    measurements = []
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(candidates))
        for candidate in candidates:

            def tell(share: float, line: str = "", candidate: Candidate = candidate) -> None:
                progress.advance(task, share)
                if line:
                    progress.console.print(f"{candidate.file}: {line}", soft_wrap=True)

            checkpoint = load_checkpoint(str(candidate.file), settings.device)
            measurements.append(evaluation.measure(checkpoint, data_of(checkpoint, settings.data), tell))
    return record | evaluation.record(candidates, measurements)


def _read(path: Path, name: str) -> dict[str, Any]:
    """The record in a file.

    Raises:
        UserError: It is not the record of an evaluation.
    """
    try:
        record = mapping(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): give the {name}.json of an evaluation") from error
    if not {"command", "checkpoints", "git", "hardware", "versions", "when"} <= record.keys():
        raise UserError(f"{path} is no record of an evaluation: give its {name}.json, or run folders")
    return record

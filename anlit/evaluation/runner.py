"""What every evaluation does: load checkpoints and their data, measure each, write JSON, a page, pictures and a table.

Page, pictures and table are functions of the JSON alone. So an evaluation that is given the JSON file of an earlier one
writes them again, without any model.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from anlit.checkpoints.location import find_checkpoint
from anlit.compare.comparison import refuse_other_report
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import data_of
from anlit.evaluation.settings import MULTIPLES, Settings
from anlit.io.provenance import environment
from anlit.io.read import read_json
from anlit.io.write import jsonable, write_json, writing
from anlit.reporting.figure import save, style
from anlit.reporting.page import write_page
from anlit.reporting.table import Table, console
from anlit.reporting.text import code, literal
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from anlit.training.load_model import (
    Checkpoint,
    describe,
    device_name,
    find_device,
    load_checkpoint,
)


class Report(NamedTuple):
    """What an evaluation shows of its record."""

    table: Table  # the main numbers
    parts: list[str]  # the page in Markdown, without the provenance
    figures: Mapping[str, Callable[[], Figure]]  # the pictures by their files' names
    notes: Sequence[str] = ()  # sentences to print below the table


class Evaluation:
    """One kind of evaluation: what it measures, and how it shows that."""

    name: ClassVar[str]  # of the JSON file
    page: ClassVar[str] = "report"
    digits: ClassVar[int | None] = None  # significant ones in the record; None for all

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """Decide what to measure, the same for all checkpoints; returns what the record adds to the settings.

        The checkpoints' models are on the meta device; `data` are those of the first one, all have the same tokens.
        Raises UserError if it cannot be measured on these data.
        """
        multiples = (times * own.training_length for own in checkpoints for times in MULTIPLES)
        self.lengths = sorted(set(self.settings.lengths or multiples))
        return {"lengths": self.lengths}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> Any:
        """The measurements of one checkpoint; tells how far it is with `say`."""
        raise NotImplementedError

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        """The measurements in the record, and what follows from them."""
        raise NotImplementedError

    def report(self, record: dict[str, Any]) -> Report:
        """What to show of a record, as it is read from JSON."""
        raise NotImplementedError

    def measured(self, paths: Sequence[str]) -> dict[str, Any]:
        """What the record has beside its provenance: the checkpoints are loaded one after the other and measured."""
        settings = self.settings
        device = find_device(settings.device)
        checkpoints, data = load_checkpoints(paths, settings.data)
        plan, measurements = self.plan(checkpoints, data), []
        for each in checkpoints:
            checkpoint = load_checkpoint(str(each.file), settings.device)
            measurements.append(self.measure(checkpoint, data_of(checkpoint, settings.data)))
        return {
            "device": device_name(device),
            "checkpoints": list(map(describe, checkpoints)),
            "data": data.fingerprint,
            "settings": asdict(settings) | plan,
            **self.record(checkpoints, measurements),
        }


def load_checkpoints(
    paths: Sequence[str], data_path: str | None
) -> tuple[list[Checkpoint], TokenShards]:
    """Load each checkpoint and its data once, so that faults are found before anything is measured.

    Returns the checkpoints, with their models on the meta device, and the data of the first. Raises UserError if a
    checkpoint or its data are wrong, or two have different data.
    """
    checkpoints, data = [], []
    for file in {file.resolve(): file for file in map(find_checkpoint, paths)}.values():
        checkpoints.append(load_checkpoint(str(file), "cpu"))
        data.append(data_of(checkpoints[-1], data_path))
        checkpoints[-1].model.to("meta")  # frees the weights
    ours = data[0].fingerprint
    for checkpoint, theirs in zip(checkpoints, (own.fingerprint for own in data), strict=True):
        if ours["content_sha256"] != theirs["content_sha256"]:
            raise UserError(
                f"{checkpoints[0].file} and {checkpoint.file} have different data ({ours['path']} and "
                f"{theirs['path']}), so their results cannot be compared: set --data"
            )
    return checkpoints, data[0]


def group_by_seed(checkpoints: Sequence[Checkpoint]) -> list[dict[str, Any]]:
    """The arms: {label, checkpoints}, the latter as indices, in the order of their first checkpoint.

    Runs that differ only in their seed are one arm, also if each was fine-tuned from other weights. best.ckpt and
    last.ckpt of a run are different arms. A file outside a run folder is an arm of its own. Labels are unique.
    """
    groups = group_runs(
        [load_run(run) for run in dict.fromkeys(own.run for own in checkpoints) if run is not None]
    )
    labels = {run.folder.resolve(): group.label for group in groups for run in group.runs}
    arms: dict[tuple[str, str], list[int]] = {}  # label and file → indices
    for index, own in enumerate(checkpoints):
        label = labels.get(own.run.resolve()) if own.run is not None else None
        # Without a run's configuration it is not known what the file has in common with others.
        key = (label, own.file.name) if label else (own.label, str(own.file))
        arms.setdefault(key, []).append(index)
    n_arms = Counter(label for label, _ in arms)
    return [
        {"label": f"{label}, {file}" if n_arms[label] > 1 else label, "checkpoints": members}
        for (label, file), members in arms.items()
    ]


def evaluate(evaluation: Evaluation, paths: Sequence[str], folder: Path, command: str) -> None:
    """Measure, write the results into `folder` and print the table.

    `paths` are run folders or checkpoints; or the JSON file of an earlier evaluation, which is only shown again.
    `command` is what the user typed. Raises UserError if a checkpoint, the data or a setting is wrong, if possible
    before anything is measured; the folder cannot be written or has the report of another command; or the JSON file is
    no record of this evaluation.
    """
    name = evaluation.name
    if evaluation.page == "report":  # the others have pages of their own name
        refuse_other_report(folder, name + ".json")
    if is_shown_again := len(paths) == 1 and paths[0].endswith(".json"):
        record = read_json(paths[0], {}, f"give the {name}.json of an evaluation")
    else:
        # Before measuring, because the environment has the load of the machine.
        header = {
            "command": command,
            **environment(),
            "device": None,
            "checkpoints": [],
            "data": None,
        }
        record = jsonable(header | evaluation.measured(paths), evaluation.digits)
        with writing(folder):
            write_json(folder / f"{name}.json", record, indent=None)
    try:
        report, sources = evaluation.report(record), _provenance(record)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        if not is_shown_again:
            raise
        raise UserError(
            f"{paths[0]} is no record of this evaluation ({error!r}): give its {name}.json"
        ) from error
    screen = console()
    for part in (report.table, *report.notes):
        screen.print(part)
    with writing(folder), style(8), rc_context({"lines.linewidth": 1.2, "lines.markersize": 3.5}):
        for file, draw in report.figures.items():
            save(draw(), folder / file)
        page = write_page(
            folder, evaluation.page, [*report.parts, "## Where the numbers come from", sources]
        )
    screen.print(f"Report: {page}", soft_wrap=True)


def _provenance(record: dict[str, Any]) -> str:
    """Command, commit, hardware, versions, data and checkpoints of a record, as a list in Markdown."""
    git, data = record["git"], record["data"]
    commit = (
        (git["commit"] + (" (with changes)" if git["dirty"] else "")) if git else "not recorded"
    )
    machine = f"{record['hardware']['cpu']}, {record['hardware']['cores']} cores; device {record['device']}"
    lines = [
        f"command: {code(record['command'])}",
        f"commit: {commit}, {record['when']}",
        f"hardware: {literal(machine)}",
        "versions: "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
    ]
    if data:
        content = str(data["content_sha256"])[:12]
        lines.append(
            f"data: {literal(str(data['corpus']))}, {code(str(data['path']))}, content {content}"
        )
    lines += [
        f"{literal(own['label'])}: {code(own['file'])}, step {own['step']:,}"
        for own in record["checkpoints"]
    ]
    return "\n".join(f"- {line}" for line in lines)

"""The steps of every evaluation: load checkpoints and data, measure, write JSON, page and figures.

Page, figures and table are functions of the JSON alone. So an earlier JSON file gives them again,
without any model.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from anlit.checkpoints.location import find_checkpoint
from anlit.compare.comparison import refuse_other_report
from anlit.data.module import TokenShards
from anlit.errors import UserError
from anlit.evaluation.data import load_validation_data
from anlit.evaluation.settings import MULTIPLES, EvaluationSettings
from anlit.evaluation.training_differences import notes_on_training
from anlit.io.provenance import environment
from anlit.io.read import read_json
from anlit.io.write import jsonable, write_json, writing
from anlit.reporting.figure import save, style
from anlit.reporting.page import write_page
from anlit.reporting.table import Table, console
from anlit.reporting.text import code, literal
from anlit.runs.folders import Run, load_run
from anlit.runs.groups import group_runs, last_of_seeds
from anlit.training.load_model import (
    Checkpoint,
    describe,
    device_name,
    find_device,
    load_checkpoint,
)

LINE_STYLE: Any = {"lines.linewidth": 1.2, "lines.markersize": 3.5}
"""matplotlib's settings of an evaluation's figures."""


class Report(NamedTuple):
    """Tables and figures of a record."""

    tables: Sequence[Table]
    """The main numbers, for the terminal."""
    paragraphs: list[str]
    """The page in Markdown, without the provenance."""
    figures: Mapping[str, Callable[[], Figure]]
    """Functions that draw the figures, by file name."""
    notes: Sequence[str] = ()
    """Sentences to print below the table."""


class Evaluation:
    """A kind of evaluation: how it measures, and how it reports the measurements.

    A subclass gives `name`, `measure`, `record` and `report`. An evaluation without checkpoints
    overrides `measure_all` instead of `measure` and `record`.
    """

    name: ClassVar[str]
    """Name of the JSON file, without `.json`."""
    page: ClassVar[str] = "report"
    """Name of the page, without `.md` and `.html`."""
    digits: ClassVar[int | None] = None
    """Significant digits of numbers in the record; None for all."""
    lengths: list[int]
    """Tokens per sequence or sample, ascending; set by `plan`."""

    def __init__(self, settings: EvaluationSettings) -> None:
        self.settings = settings

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """Choose the measurements, the same for all checkpoints.

        Args:
            checkpoints: Their models may be on the meta device.
            data: The data of the first checkpoint. All have the same tokens.

        Returns:
            What the record adds to the settings.

        Raises:
            UserError: These data do not suffice.
        """
        lengths = self.settings.lengths
        if not lengths:
            training_lengths = [checkpoint.training_length for checkpoint in checkpoints]
            pairs = product(training_lengths, MULTIPLES)
            lengths = tuple(length * multiple for length, multiple in pairs)
        self.lengths = sorted(set(lengths))
        return {"lengths": self.lengths}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> Any:
        """Measure a checkpoint; report progress with `say`."""
        raise NotImplementedError

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        """The measurements of all checkpoints in the form of the record, with averages."""
        raise NotImplementedError

    def report(self, record: dict[str, Any]) -> Report:
        """Make tables and figures of a record that was read from JSON."""
        raise NotImplementedError

    def measure_all(self, paths: Sequence[str]) -> dict[str, Any]:
        """Measure the checkpoints; returns the record without command and environment.

        All are loaded once before any is measured, to find faults early. Then each of several is
        loaded again and measured. The weights of all may not fit into memory.
        """
        settings = self.settings
        device = find_device(settings.device)
        checkpoints, data = load_checkpoints(paths, settings.data, settings.device)
        plan = self.plan(checkpoints, data)
        descriptions = list(map(describe, checkpoints))
        measurements = []
        for checkpoint in checkpoints:
            if checkpoint.device.type == "meta":
                checkpoint = load_checkpoint(str(checkpoint.file), settings.device)
            checkpoint_data = load_validation_data(checkpoint, settings.data)
            measurements.append(self.measure(checkpoint, checkpoint_data))
        return {
            "device": device_name(device),
            "checkpoints": descriptions,
            "data": data.fingerprint,
            "settings": asdict(settings) | plan,
            **self.record(checkpoints, measurements),
        }


def load_checkpoints(
    paths: Sequence[str], data_path: str | None, device: str
) -> tuple[list[Checkpoint], TokenShards]:
    """Load each checkpoint and its data once, so that faults are found before any measurement.

    Returns:
        The checkpoints, and the data of the first. The model of a single checkpoint is on the
        device. Models of several are on the meta device.

    Raises:
        UserError: A checkpoint or its data are wrong, or two have different data.
    """
    checkpoints: list[Checkpoint] = []
    data: list[TokenShards] = []
    files = {file.resolve(): file for file in map(find_checkpoint, paths)}
    is_single = len(files) == 1
    for file in files.values():
        checkpoint = load_checkpoint(str(file), device if is_single else "cpu")
        checkpoints.append(checkpoint)
        data.append(load_validation_data(checkpoint, data_path))
        if not is_single:
            checkpoint.model.to("meta")  # frees the weights
    first_data = data[0].fingerprint
    for checkpoint, checkpoint_data in zip(checkpoints, data, strict=True):
        other_data = checkpoint_data.fingerprint
        if first_data["content_sha256"] != other_data["content_sha256"]:
            raise UserError(
                f"{checkpoints[0].file} and {checkpoint.file} have different data "
                f"({first_data['path']} and {other_data['path']}), so their results cannot be "
                "compared: set --data"
            )
    return checkpoints, data[0]


def group_by_seed(checkpoints: Sequence[Checkpoint]) -> tuple[list[dict[str, Any]], list[str]]:
    """Group checkpoints into arms, in the order of their first checkpoint.

    An arm is {label, checkpoints}: a unique label and indices of checkpoints. Runs that differ only
    in their seed share an arm, even if their initial weights differ. If runs have the same seeds,
    the one that started last counts. best.ckpt and last.ckpt of a run are different arms. A file
    outside a run folder is an arm alone.

    Returns:
        The arms, and notes: on each checkpoint that does not count, and on arms that were not
        trained alike.
    """
    runs = [_run_of(checkpoint) for checkpoint in checkpoints]
    labels: dict[Path, str] = {}
    for group in group_runs({run.folder: run for run in runs}.values()):
        for run in group.runs:
            labels[run.folder] = group.label
    members_by_arm: dict[tuple[str, str], dict[Run, int]] = {}  # by label and file
    for index, (checkpoint, run) in enumerate(zip(checkpoints, runs, strict=True)):
        label = labels.get(run.folder)
        # Without a run's configuration nothing tells which files belong together.
        lone_arm = (checkpoint.label, str(checkpoint.file))
        arm = (label, checkpoint.file.name) if label else lone_arm
        members_by_arm.setdefault(arm, {})[run] = index
    n_arms_by_label = Counter(label for label, _ in members_by_arm)
    arms = []
    notes = []
    first_of_arms = {}
    for (label, file), index_by_run in members_by_arm.items():
        unique_label = f"{label}, {file}" if n_arms_by_label[label] > 1 else label
        counted = sorted(index_by_run[run] for run in last_of_seeds(index_by_run))
        arms.append({"label": unique_label, "checkpoints": counted})
        first_of_arms[unique_label] = (checkpoints[counted[0]], runs[counted[0]])
        for index in index_by_run.values():
            if index not in counted:
                left_out = f"{checkpoints[index].file} is left out"
                notes.append(f"{unique_label}: {left_out}, because a later run has the same seed.")
    notes += notes_on_training(first_of_arms)
    return arms, notes


def _run_of(checkpoint: Checkpoint) -> Run:
    """The run of a checkpoint; for a file outside a run folder a run without content."""
    if checkpoint.run is None:
        return Run(checkpoint.file, {}, {})
    return load_run(checkpoint.run)


def evaluate(evaluation: Evaluation, paths: Sequence[str], folder: Path, command: str) -> None:
    """Measure, write the results into `folder` and print the table.

    Args:
        evaluation: The kind of evaluation.
        paths: Run folders or checkpoints. Or the JSON file of an earlier evaluation, which is
            only shown again.
        folder: Where the results are written.
        command: The command line that the user typed.

    Raises:
        UserError: A checkpoint, the data or a setting is wrong, if possible before any measurement.
            The folder cannot be written, or has a report of another command. The JSON file is not a
            record of this evaluation.
    """
    name = evaluation.name
    if evaluation.page == "report":  # several commands write a page of this name
        refuse_other_report(folder, name + ".json")
    is_shown_again = len(paths) == 1 and paths[0].endswith(".json")
    if is_shown_again:
        record = read_json(paths[0], {}, f"give the {name}.json of an evaluation")
    else:
        record = _measure_record(evaluation, paths, command)
        # Written before the report, so that an error in a figure loses no measurement.
        with writing(folder):
            write_json(folder / f"{name}.json", record, indent=None)
    try:
        report = evaluation.report(record)
        provenance = _provenance(record)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        # A foreign JSON file fails somewhere in the report. A new record does so by our fault only.
        if not is_shown_again:
            raise
        raise UserError(
            f"{paths[0]} is not a record of this evaluation ({error!r}): give its {name}.json"
        ) from error
    screen = console()
    for table in report.tables:
        screen.print(table)
    for note in report.notes:
        screen.print(note)
    with writing(folder), style(), rc_context(LINE_STYLE):
        for file, draw in report.figures.items():
            save(draw(), folder / file)
        paragraphs = [*report.paragraphs, "## Where the numbers come from", provenance]
        page = write_page(folder, evaluation.page, paragraphs)
    screen.print(f"Report: {page}", soft_wrap=True)


def _measure_record(evaluation: Evaluation, paths: Sequence[str], command: str) -> dict[str, Any]:
    """Measure; returns the record with its provenance, as JSON has it."""
    # The environment has the load of the machine, so it is read before measuring.
    header = {"command": command, **environment()}
    # For evaluations without a model. `measure_all` replaces them otherwise.
    header |= {"device": None, "checkpoints": [], "data": None}
    return jsonable(header | evaluation.measure_all(paths), evaluation.digits)


def _provenance(record: dict[str, Any]) -> str:
    """Command, commit, hardware, versions, data and checkpoints, as a list in Markdown."""
    git = record["git"]
    data = record["data"]
    hardware = record["hardware"]
    commit = "not recorded"
    if git:
        commit = f"{git['commit']} (with changes)" if git["dirty"] else git["commit"]
    machine = f"{hardware['cpu']}, {hardware['cores']} cores; device {record['device']}"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        f"command: {code(record['command'])}",
        f"commit: {commit}, {record['when']}",
        f"hardware: {literal(machine)}",
        f"versions: {versions}",
    ]
    if data:
        content = str(data["content_sha256"])[:12]
        corpus = literal(str(data["corpus"]))
        lines.append(f"data: {corpus}, {code(str(data['path']))}, content {content}")
    for model in record["checkpoints"]:
        lines.append(f"{literal(model['label'])}: {code(model['file'])}, step {model['step']:,}")
    return "\n".join(f"- {line}" for line in lines)

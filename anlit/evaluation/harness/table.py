"""The table of downstream results."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from anlit.evaluation.harness.tasks import Metric
from anlit.evaluation.record import provenance
from anlit.reporting.table import NONE, markdown_table, terminal_table
from anlit.reporting.text import literal


def labels(checkpoints: Sequence[dict[str, Any]]) -> list[str]:
    """The titles of the columns: architecture and attention, with the file if several are equal."""
    plain = [one["label"] for one in checkpoints]
    return [f"{one['label']} ({one['file']})" if plain.count(one["label"]) > 1 else one["label"] for one in checkpoints]


def rows(labels: Sequence[str], metrics: Sequence[Sequence[Metric]]) -> tuple[list[str], list[list[str]]]:
    """The head and body of the table: a row for each task and metric, a column for each checkpoint."""
    keys = list(dict.fromkeys((one.task, one.name) for of_checkpoint in metrics for one in of_checkpoint))
    found = [{(one.task, one.name): one for one in of_checkpoint} for of_checkpoint in metrics]
    body = [[task, name, *(_cell(by_key.get((task, name))) for by_key in found)] for task, name in keys]
    return ["task", "metric", *labels], body


def _cell(metric: Metric | None) -> str:
    if metric is None:
        return NONE
    error = f" ± {metric.error:.4f}" if metric.error is not None else ""
    return f"{metric.value:.4f}{error}"


def show(head: list[str], body: list[list[str]], console: Console) -> None:
    """Print the table."""
    console.print(terminal_table("Downstream tasks", head, body, left=(0, 1), names=2))


def markdown(head: list[str], body: list[list[str]], record: dict[str, Any]) -> str:
    """evaluate.md."""
    settings = record["settings"]
    shots = "as in the tasks" if settings["shots"] is None else settings["shots"]
    limit = "" if settings["limit"] is None else f", the first {settings['limit']} questions of each task"
    return (
        "# Downstream tasks\n\n"
        f"lm_eval {record['lm_eval']}, examples before a question: {shots}{limit}; ± is the standard error over "
        f"questions.\n\n{markdown_table([literal(name) for name in head], body)}\n\n{provenance(record)}\n"
    )

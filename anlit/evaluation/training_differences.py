"""Notes on arms that were not trained alike. Tables of evaluations show them side by side."""

import math
from collections.abc import Iterator, Mapping

from anlit.io.metrics_csv import parse_cell, read_rows
from anlit.runs.folders import METRICS, Run
from anlit.training.load_model import Checkpoint

TOKENS_APART = 0.01
"""Share of the larger number by which training tokens may differ without a note."""
TOKEN_COLUMNS = ("train/tokens", "val/tokens")
"""Columns of metrics.csv with the training tokens so far."""


def notes_on_training(arms: Mapping[str, tuple[Checkpoint, Run]]) -> Iterator[str]:
    """Tell of arms with other training lengths, training tokens or data.

    Args:
        arms: Label → a checkpoint of the arm and its run. What is not known of a checkpoint is not
            compared.
    """
    lengths = {}
    tokens = {}
    contents = {}
    for label, (checkpoint, run) in arms.items():
        lengths[label] = checkpoint.training_length
        n_tokens = _tokens_until(run, checkpoint.step)
        if n_tokens is not None:
            tokens[label] = n_tokens
        content = (checkpoint.trained_on or {}).get("content_sha256")
        if content:
            contents[label] = content[:12]
    if len({*lengths.values()}) > 1:
        yield f"The models were trained at different lengths, in tokens: {_numbers(lengths)}."
    if tokens and max(tokens.values()) - min(tokens.values()) > TOKENS_APART * max(tokens.values()):
        yield f"The models were trained on different numbers of tokens: {_numbers(tokens)}."
    if len({*contents.values()}) > 1:
        yield f"The models were trained on different data, content: {_in_words(contents)}."


def _tokens_until(run: Run, n_steps: int) -> int | None:
    """The training tokens of a run's first `n_steps` steps, as far as they are logged, or None.

    The best checkpoint may be far from the run's end.
    """
    path = run.folder / METRICS
    counts = []
    for row in read_rows(path) if path.is_file() else []:
        if parse_cell(row, "step", path) < n_steps:
            counts += [parse_cell(row, column, path) for column in TOKEN_COLUMNS]
    return int(max((count for count in counts if not math.isnan(count)), default=0)) or None


def _numbers(values: Mapping[str, int]) -> str:
    return _in_words({label: f"{value:,}" for label, value in values.items()})


def _in_words(values: Mapping[str, str]) -> str:
    return "; ".join(f"{label}: {value}" for label, value in values.items())

"""Notes on arms that were not trained alike. Tables of evaluations show them side by side."""

from collections.abc import Iterator, Mapping

from anlit.runs.folders import Run
from anlit.training.load_model import Checkpoint

TOKENS_APART = 0.01
"""Share of the larger number by which training tokens may differ without a note."""


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
        if len(run.curve):
            tokens[label] = int(run.curve.tokens[-1])
        content = (checkpoint.trained_on or {}).get("content_sha256")
        if content:
            contents[label] = content[:12]
    if len({*lengths.values()}) > 1:
        yield f"The models were trained at different lengths, in tokens: {_numbers(lengths)}."
    if tokens and max(tokens.values()) - min(tokens.values()) > TOKENS_APART * max(tokens.values()):
        yield f"The models were trained on different numbers of tokens: {_numbers(tokens)}."
    if len({*contents.values()}) > 1:
        yield f"The models were trained on different data, content: {_in_words(contents)}."


def _numbers(values: Mapping[str, int]) -> str:
    return _in_words({label: f"{value:,}" for label, value in values.items()})


def _in_words(values: Mapping[str, str]) -> str:
    return "; ".join(f"{label}: {value}" for label, value in values.items())

"""The units of a comparison: nats per token over tokens, or bits per byte over bytes of text.

A token of one tokenizer is more text than a token of another. So runs with different tokenizers
compare by the text behind their tokens:

    bits per byte = nats per token / ln 2 / bytes per token of the validation split
    bytes of training text = training tokens · bytes per token of the training split

Both splits count the token that ends a document, which has no bytes.
"""

import math
from dataclasses import dataclass

from anlit.runs.folders import Curve, Run


@dataclass(frozen=True)
class Measure:
    """The units of a comparison in words.

    Args:
        loss: The unit of a loss.
        unit: What training is counted in: token or byte.
        length: The length of training, for an axis.
        short_length: The same in a word, for a column.
    """

    loss: str
    unit: str
    length: str
    short_length: str

    def units_per_token(self, run: Run) -> float:
        """The length of a training token of the run, on the axis of this measure."""
        return 1.0

    def curve_of(self, run: Run) -> Curve:
        """The run's validation curve; `tokens` and `loss` are in the units of this measure."""
        return run.curve

    def final_loss_of(self, run: Run) -> float:
        """The run's last validation loss, which `Run.final_loss` has in nats per token."""
        return float(self.curve_of(run).loss[-1])


@dataclass(frozen=True)
class TextMeasure(Measure):
    """Bits per byte over bytes of text."""

    def units_per_token(self, run: Run) -> float:
        return bytes_per_token(run, "train")

    def curve_of(self, run: Run) -> Curve:
        curve = run.curve
        bits_per_token = curve.loss / math.log(2)
        return Curve(
            curve.tokens * self.units_per_token(run),
            curve.seconds,
            bits_per_token / bytes_per_token(run, "val"),
        )


NATS_PER_TOKEN = Measure("nats per token", "token", "training tokens", "tokens")
BITS_PER_BYTE = TextMeasure("bits per byte", "byte", "bytes of training text", "text")


def bytes_per_token(run: Run, split: str) -> float:
    """Return the bytes of text per token of a split of the run's data, which its record has."""
    counts = run.split_counts(split)
    return float(counts["bytes"]) / float(counts["tokens"])

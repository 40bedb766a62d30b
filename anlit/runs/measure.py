"""The units of a comparison: nats per token, or bits per byte of text.

Tokens of two tokenizers are different amounts of text. Runs with different tokenizers compare by
the text behind their tokens.

    bits per byte = nats per token / ln 2 / bytes per token of the validation split
    bytes of training text = training tokens · bytes per token of the training split

Both splits count the token that ends a document. It has no bytes.
"""

import math
from dataclasses import dataclass

from anlit.runs.folders import Curve, Run


@dataclass(frozen=True)
class Measure:
    """The units of a comparison.

    Args:
        loss: The unit of a loss, in words.
        unit: What training is counted in: token or byte.
        length: The length of training, for an axis.
        short_length: The same in a word, for a column.
        is_text: Whether the units are bits per byte and bytes of text.
    """

    loss: str
    unit: str
    length: str
    short_length: str
    is_text: bool

    def units_per_token(self, run: Run) -> float:
        """The length of a training token of the run, on the axis of this measure."""
        return bytes_per_token(run, "train") if self.is_text else 1.0

    def curve_of(self, run: Run) -> Curve:
        """The run's validation curve; `tokens` and `loss` are in the units of this measure."""
        curve = run.curve
        if not self.is_text:
            return curve
        tokens = curve.tokens * self.units_per_token(run)
        loss = curve.loss / math.log(2) / bytes_per_token(run, "val")
        return Curve(tokens, curve.seconds, loss)

    def final_loss_of(self, run: Run) -> float:
        """The run's last validation loss, which `Run.final_loss` has in nats per token."""
        return float(self.curve_of(run).loss[-1])


NATS_PER_TOKEN = Measure("nats per token", "token", "training tokens", "tokens", is_text=False)
BITS_PER_BYTE = Measure("bits per byte", "byte", "bytes of training text", "text", is_text=True)


def bytes_per_token(run: Run, split: str) -> float:
    """Return the bytes of text per token of a split, from the run's record."""
    counts = run.split_counts(split)
    return float(counts["bytes"]) / float(counts["tokens"])

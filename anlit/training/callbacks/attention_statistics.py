"""Attention statistics during training."""

import math
from typing import Any

import lightning as L

from anlit.errors import UserError
from anlit.nn.attention.observe import observed
from anlit.nn.attention.statistics import ranges
from anlit.training.callbacks.throughput import measuring
from anlit.training.lightning_internals import completes_step

WITH_EXTREMES = ("entropy", "inverse_largest_weight", "participation", "attention_sink")
"""The statistics that are logged with the smallest and largest mean of a head."""


class AttentionStatistics(L.Callback):
    """Logs each layer's attention statistics every n steps, after the step and on its batch.

    `attention/layer_00/entropy` … are means over heads and over all queries of the batch's first
    sequences. `anlit.nn.attention.statistics` defines them. `…/entropy_min` and `…/entropy_max` are
    the smallest and largest mean of a head. The extra forward pass does not change training. It
    computes no gradient, applies no dropout and draws no random numbers.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        sequences: Measured sequences of the batch; each costs about a forward pass with eager
            attention.
    """

    changes_learning = False

    def __init__(self, every_n_steps: int = 500, sequences: int = 1) -> None:
        require_positive(self, every_n_steps=every_n_steps, sequences=sequences)
        self.every_n_steps = every_n_steps
        self.sequences = sequences

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_steps == 0 and completes_step(trainer):
            with measuring(trainer, pl_module) as values:
                values |= layer_statistics(pl_module, batch, self.sequences)


def require_positive(callback: L.Callback, **settings: int) -> None:
    """Raise UserError if a setting of the callback is below 1."""
    for name, value in settings.items():
        if value < 1:
            raise UserError(f"{type(callback).__name__} has {name}={value}: it must be at least 1")


def layer_statistics(model: Any, batch: Any, sequences: int) -> dict[str, float]:
    """Run `model` on the first sequences of `batch`; return statistics by name in the log."""
    tokens = batch.tokens[:sequences]
    document_ids = batch.document_ids[:sequences]
    with observed(model, [1], ranges(tokens.shape[1] - 1)) as layers:
        model(tokens, document_ids)
    values: dict[str, float] = {}
    for number, layer in enumerate(layers):
        for name, heads in layer.means().items():
            means = [mean for mean in heads[:, 0].tolist() if not math.isnan(mean)]
            if name == "n" or not means:
                continue
            key = f"attention/layer_{number:02d}/{name}"
            values[key] = sum(means) / len(means)
            if name in WITH_EXTREMES:
                values[f"{key}_min"] = min(means)
                values[f"{key}_max"] = max(means)
    return values

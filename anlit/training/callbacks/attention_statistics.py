"""Attention statistics during training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import nn

from anlit.attention.observation import BinnedMeans, observed
from anlit.attention.statistics import ranges
from anlit.errors import UserError
from anlit.lightning_internals import completes_step
from anlit.training.callbacks.throughput import leave_out

# For these the minimum and maximum over heads are logged too.
SPREAD = ("entropy", "inverse_largest_weight", "participation", "attention_sink")


class AttentionStatistics(L.Callback):
    """Logs each layer's attention statistics every n steps, after the step and on its batch.

    `attention/layer_00/entropy` … (see `anlit.attention.statistics`) are means over heads and over all queries of the
    batch's first sequences; `…/entropy_min` and `…/entropy_max` are the smallest and largest mean of a head. They are
    logged at the step that logs the loss of this batch. The extra forward pass has no gradient and no dropout and draws
    no random numbers, so it does not change training.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        sequences: Sequences of the batch that are measured; each costs about a forward pass with eager attention.
    """

    def __init__(self, every_n_steps: int = 500, sequences: int = 1) -> None:
        if every_n_steps < 1 or sequences < 1:
            raise UserError(
                f"AttentionStatistics has sequences={sequences} and every_n_steps={every_n_steps}: "
                "both must be at least 1"
            )
        self.every_n_steps, self.sequences = every_n_steps, sequences

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.every_n_steps or not completes_step(trainer):
            return
        begun = time.perf_counter()
        with evaluating(pl_module), torch.no_grad(), trainer.precision_plugin.forward_context():
            values = layer_statistics(pl_module, batch, self.sequences)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step - 1)  # the step at which Lightning logs the loss of this batch
        leave_out(trainer, time.perf_counter() - begun)


def layer_statistics(model: Any, batch: Any, sequences: int) -> dict[str, float]:
    """Run `model` on the first sequences of `batch`; returns the statistics of each layer by the names in the log."""
    tokens, document_ids = batch.tokens[:sequences], batch.document_ids[:sequences]
    with observed(model, [1], ranges(tokens.shape[1] - 1)) as layers:
        model(tokens, document_ids)
    return {
        f"attention/layer_{number:02d}/{name}": value
        for number, layer in enumerate(layers)
        for name, value in _of_layer(layer).items()
    }


def _of_layer(layer: BinnedMeans) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, heads in layer.means().items():
        if name == "n" or not (known := [value for value in heads[:, 0].tolist() if value == value]):
            continue
        values[name] = sum(known) / len(known)
        if name in SPREAD:
            values |= {f"{name}_min": min(known), f"{name}_max": max(known)}
    return values


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode, and restore each module's mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

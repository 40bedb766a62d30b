"""How attention spreads its weights while a model learns."""

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
from anlit.training.callbacks.throughput import Throughput

# Of these the least and the greatest head are logged too.
SPREAD = ("entropy", "inverse_largest_weight", "participation", "weight_on_first")


class AttentionStatistics(L.Callback):
    """Logs each layer's attention statistics every so many steps, from the step's own batch after the step.

    `attention/layer_00/entropy` … (see `anlit.attention.statistics`) are means over heads and over the queries of the
    first sequences of the batch, whatever their context lengths; `…/entropy_min` and `…/entropy_max` are the least and
    greatest mean of a head. They go to the Trainer's loggers at the step whose loss the batch has. The pass runs
    without gradient and without dropout, and draws no random number: training goes on as if it had not been.

    Args:
        every_n_steps: Optimizer steps between two looks.
        sequences: How many sequences of the batch are looked at; each costs about a forward pass with eager attention.
    """

    def __init__(self, every_n_steps: int = 500, sequences: int = 1) -> None:
        if every_n_steps < 1 or sequences < 1:
            raise UserError(
                f"AttentionStatistics looks at sequences={sequences} of a batch every_n_steps={every_n_steps}: "
                "both must be at least 1"
            )
        self.every_n_steps, self.sequences = every_n_steps, sequences
        self._looked_at = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._looked_at = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._looked_at or step % self.every_n_steps:  # several micro-batches make one step
            return
        self._looked_at = step
        begun = time.perf_counter()
        with evaluating(pl_module), torch.no_grad(), trainer.precision_plugin.forward_context():
            values = layer_statistics(pl_module, batch, self.sequences)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step - 1)  # where Lightning puts the loss of this batch
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Throughput):
                callback.leave_out(time.perf_counter() - begun)


def layer_statistics(model: Any, batch: Any, sequences: int) -> dict[str, float]:
    """Run `model` on the first sequences of `batch` and give what is logged of each layer."""
    tokens, document_ids = batch.tokens[:sequences], batch.document_ids[:sequences]
    with observed(model, [1], ranges(tokens.shape[1] - 1)) as layers:
        model(tokens, document_ids)
    values: dict[str, float] = {}
    for number, layer in enumerate(layers):
        values |= {f"attention/layer_{number:02d}/{name}": value for name, value in _of_layer(layer).items()}
    return values


def _of_layer(layer: BinnedMeans) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, heads in layer.means().items():
        if name in ("n", "visible_keys") or not (there := [value for value in heads[:, 0].tolist() if value == value]):
            continue
        values[name] = sum(there) / len(there)
        if name in SPREAD:
            values |= {f"{name}_min": min(there), f"{name}_max": max(there)}
    return values


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every part in eval mode, and each in its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode

"""Logs the gradient noise scale, which tells how large a batch pays.

McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1. A
step averages the gradients of K micro-batches of b tokens. Let G be the gradient of the expected
loss by the matrices. Let tr Σ / b be the variance of a micro-batch's gradient, summed over them:

    E|g_micro|² = |G|² + tr Σ / b        E|g_step|² = |G|² + tr Σ / (K b)

Two measured norms give unbiased estimates of |G|² and tr Σ. The noise scale is the ratio of their
means, B_simple = tr Σ / |G|² tokens.
"""

import math
from typing import Any

import lightning as L
import torch
from torch.distributed.fsdp import FSDPModule

from anlit.errors import UserError
from anlit.nn.layers.sharded import reshard
from anlit.training.callbacks.attention_statistics import require_positive
from anlit.training.lightning_internals import completes_step
from anlit.training.optim.micro_gradients import (
    LocalMicroGradients,
    MicroGradients,
    ShardedMicroGradients,
)

STATE = ("squared_gradient", "trace", "weight")
"""The attributes that a checkpoint holds."""


class GradientNoiseScale(L.Callback):
    """Logs tr Σ / |G|² every n steps, the tokens of a batch with as much noise as signal.

    Far below it, a larger batch saves as many steps as it costs. Far above it, it saves hardly any.

    - `noise/scale`: the noise scale in tokens, the ratio of the next two. It is left out where the
      mean of |G|² is not positive. The batch is then too small to show G.
    - `noise/squared_gradient`: |G|², a moving average of unbiased estimates.
    - `noise/trace`: tr Σ per token, likewise.

    Micro-batches are compared with their step. So a step needs two: on one device
    (`accumulate_grad_batches`), or on several with DDP. `anlit.FullySharded` adds up the devices'
    gradients of a micro-batch, so there only accumulation counts.

    Gradients are those before clipping, of matrices alone: `anlit.training.optim.micro_gradients`
    says why. Assumptions: sequences are independent draws, and micro-batches count about equally
    many targets. Vectors at their norm's bound are all of nGPT's and most of anGPT's. Only the part
    tangential to the sphere counts for them. Restoring the norms undoes the radial part. It does
    not vanish at the constrained optimum. So it would pass for signal.

    Training does not change. A measured step reads the gradients of each micro-batch once. With
    `anlit.FullySharded` it holds a copy of this rank's gradients.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        decay: The weight of earlier measurements in the moving averages.
    """

    changes_learning = False

    def __init__(self, every_n_steps: int = 10, decay: float = 0.95) -> None:
        require_positive(self, every_n_steps=every_n_steps)
        if not 0 <= decay < 1:
            raise UserError(f"GradientNoiseScale has decay={decay}: give 0 or more and less than 1")
        self.every_n_steps = every_n_steps
        self.decay = decay
        self.squared_gradient = 0.0
        self.trace = 0.0
        self.weight = 0.0
        """The sum of the weights in the two moving averages: 0 at first, 1 after many."""
        self._gradients: MicroGradients | None = None
        """The gradients of the current step, if it is measured."""
        self._tokens = 0
        """Tokens of the current micro-batch on this device."""
        self._has_news = False
        """Whether the current step has been added to the averages."""

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state_dict[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        n_ranks = _n_separate_ranks(trainer, pl_module)
        self.check_micro_batches(trainer.accumulate_grad_batches * n_ranks)

    @staticmethod
    def check_micro_batches(n_micro_batches: int) -> None:
        """Raise UserError if a step has too few micro-batches to compare."""
        if n_micro_batches < 2:
            raise UserError(
                "GradientNoiseScale compares a step with its micro-batches, and it has only one: "
                "set --trainer.accumulate_grad_batches 2 and halve --data.batch_size"
            )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tokens = batch.tokens.numel()
        is_due = (trainer.global_step + 1) % self.every_n_steps == 0
        if is_due and self._gradients is None:
            reshard(pl_module.model)  # a validation may have come before
            is_sharded = isinstance(pl_module.model, FSDPModule)
            kind = ShardedMicroGradients if is_sharded else LocalMicroGradients
            self._gradients = kind(pl_module.model)

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._gradients is None:
            return
        self._gradients.end_micro_batch()
        if completes_step(trainer):
            self._add_step(trainer, pl_module, self._gradients)
            self._gradients = None

    def _add_step(self, trainer: L.Trainer, pl_module: Any, gradients: MicroGradients) -> None:
        """Add the finished step to the averages, unless it has one micro-batch or is not finite."""
        n_ranks = _n_separate_ranks(trainer, pl_module)
        n_gradients = gradients.n_micro_batches * n_ranks
        tokens = self._tokens * trainer.world_size // n_ranks
        # A micro-batch's gradient is its share in the step's gradient, times their number.
        factor = pl_module.step_loss.factor
        step_square = gradients.step_square() * factor**2
        sum_of_squares = torch.as_tensor(gradients.squares).to(step_square)
        if n_ranks > 1:
            sum_of_squares = trainer.strategy.reduce(sum_of_squares, reduce_op="sum")
        micro_square = sum_of_squares * (gradients.n_micro_batches * factor) ** 2 / n_gradients
        if n_gradients < 2:  # the beginning of a ramp
            return
        micro_value, step_value = torch.stack([micro_square, step_square]).tolist()
        if math.isfinite(micro_value + step_value):
            self._add(*estimates(micro_value, step_value, n_gradients, tokens))
            self._has_news = True

    def _add(self, squared_gradient: float, trace: float) -> None:
        new = {"squared_gradient": squared_gradient, "trace": trace, "weight": 1.0}
        for name in STATE:
            mean = self.decay * getattr(self, name) + (1 - self.decay) * new[name]
            setattr(self, name, mean)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self._has_news:
            return
        self._has_news = False
        values = {
            "noise/squared_gradient": self.squared_gradient / self.weight,
            "noise/trace": self.trace / self.weight,
        }
        if self.squared_gradient > 0:
            values["noise/scale"] = self.trace / self.squared_gradient
        for logger in trainer.loggers:
            # Lightning logs the loss of this batch at the same step.
            logger.log_metrics(values, step=trainer.global_step - 1)


def _n_separate_ranks(trainer: L.Trainer, pl_module: Any) -> int:
    """The ranks whose gradients of a micro-batch are known one by one; 1 with FSDP2."""
    return 1 if isinstance(pl_module.model, FSDPModule) else trainer.world_size


def estimates(
    micro_square: float, step_square: float, n_micro_batches: int, tokens: int
) -> tuple[float, float]:
    """Unbiased estimates of |G|² and of tr Σ per token.

    Args:
        micro_square: The mean of |g_micro|² over the micro-batches of a step.
        step_square: |g_step|², of the mean of their gradients.
        n_micro_batches: K, at least 2.
        tokens: b, the tokens of a micro-batch.
    """
    n = n_micro_batches
    squared_gradient = (n * step_square - micro_square) / (n - 1)
    trace = (micro_square - step_square) * tokens * n / (n - 1)
    return squared_gradient, trace

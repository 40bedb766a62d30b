"""Skips steps with a loss or gradient that is NaN or far too large."""

import logging
import math
from collections import deque
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from anlit.errors import UserError
from anlit.nn.attention.qk_clip import QKClip
from anlit.training.callbacks.finite import divergence_error
from anlit.training.lightning_internals import completes_step

_log = logging.getLogger(__name__)

STATE = ("losses", "norms", "recent_bad")
"""The attributes with the last `window` steps, which a checkpoint holds as lists."""


class LossGuard(L.Callback):
    """Checks the loss and gradient norm of every optimizer step before the optimizer's step.

    A step is bad if its loss or norm is NaN or infinite. It is also bad if either is far above the
    mean of the last `window` good steps. Far is more than `spike_sigmas` standard deviations. At
    least half as many good steps come first. OLMo's skip-step optimizer has this rule.

    *Skip* drops the step's gradients. Weights and optimizer state do not change, not even by weight
    decay. Data, schedule and step number continue. `guard/skipped` is the count over the whole run.
    A line in the log names each bad step, and its loss stays in metrics.csv. The checkpoint has the
    guard's state. The host waits for the device once per step. Several ranks wait for an all-reduce
    of two numbers.

    Args:
        on_nan: The reaction to a loss or gradient norm that is NaN or infinite.
        on_spike: The reaction to a loss or gradient norm that is far too large.
        spike_sigmas: The number of standard deviations that is far too large.
        window: Number of good steps that a step is compared with.
        limit: The run ends if more than this number of the last `window` steps were bad.
    """

    changes_learning = True

    def __init__(
        self,
        on_nan: Literal["stop", "skip"] = "skip",
        on_spike: Literal["ignore", "skip"] = "ignore",
        spike_sigmas: float = 6.0,
        window: int = 128,
        limit: int = 10,
    ) -> None:
        if spike_sigmas <= 0 or window < 2 or limit < 0:
            raise UserError(
                f"LossGuard has spike_sigmas={spike_sigmas}, window={window}, limit={limit}: they "
                "must be above 0, at least 2 and at least 0"
            )
        self.on_nan = on_nan
        self.on_spike = on_spike
        self.spike_sigmas = spike_sigmas
        self.limit = limit
        self.losses = deque[float](maxlen=window)
        self.norms = deque[float](maxlen=window)
        self.recent_bad = deque[bool](maxlen=window)
        self.skipped = 0
        self._loss: Tensor | float = 0.0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: list(getattr(self, name)) for name in STATE}
        state["skipped"] = self.skipped
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        for name in STATE:
            getattr(self, name).extend(state_dict[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.check_clipping(trainer.gradient_clip_algorithm)

    @staticmethod
    def check_clipping(algorithm: str | None) -> None:
        """Raise UserError if gradients are clipped by value: their norm would not be known."""
        if algorithm == "value":
            raise UserError(
                "LossGuard needs the gradient norm: set trainer.gradient_clip_algorithm to norm"
            )

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        """Sum the micro-batches' shares of the step's loss; see `StepLoss`."""
        self._loss = loss.detach() * pl_module.step_loss.weight + self._loss

    def on_gradient_norm(self, trainer: L.Trainer, pl_module: Any, norm: Tensor) -> None:
        """Check the step, after all micro-batches and before the optimizer's step."""
        loss = torch.as_tensor(self._loss).float() * pl_module.step_loss.factor
        self._loss = 0.0
        both = torch.stack([loss, norm.detach().to(loss)])
        loss_value, norm_value = trainer.strategy.reduce(both, reduce_op="mean").tolist()
        problem = self.judge(loss_value, norm_value)
        if problem is None:
            return
        n_bad = sum(self.recent_bad)
        if n_bad > self.limit:
            problem += f", and {n_bad} of the last {len(self.recent_bad)} steps were bad"
        is_finite = math.isfinite(loss_value + norm_value)
        if n_bad > self.limit or (self.on_nan == "stop" and not is_finite):
            raise divergence_error(trainer, f"at step {trainer.global_step} {problem}")
        trainer.optimizers[0].zero_grad(set_to_none=True)  # so the optimizer skips all parameters
        for module in pl_module.modules():
            if isinstance(module, QKClip):
                module.reset_parameters()  # its record of the bad batch
        self.skipped += 1
        rank_zero_only(_log.warning)(f"step {trainer.global_step}: {problem}, the step was skipped")

    def judge(self, loss: float, norm: float) -> str | None:
        """Record a step; return its problem, or None for a good step.

        All ranks pass the same numbers and get the same answer.
        """
        problem = self._problem("loss", loss, self.losses)
        if problem is None:
            problem = self._problem("gradient norm", norm, self.norms)
        self.recent_bad.append(problem is not None)
        if problem is None:
            self.losses.append(loss)
            self.norms.append(norm)
        return problem

    def _problem(self, quantity: str, value: float, recent: deque[float]) -> str | None:
        """The problem of a quantity, not finite or far above its `recent` values; else None."""
        if not math.isfinite(value):
            return f"{quantity} {value:.4g}"
        if self.on_spike == "ignore":
            return None
        excess = sigmas(recent, value)
        if excess > self.spike_sigmas:
            return (
                f"{quantity} {value:.4g} is {excess:.1f} standard deviations above the mean of "
                "recent steps"
            )
        return None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if completes_step(trainer):
            pl_module.log("guard/skipped", torch.tensor(float(self.skipped)))  # kept on the host


def sigmas(recent: deque[float], value: float) -> float:
    """Standard deviations of `value` above the mean of recent values.

    −∞ while less than half the window is filled.
    """
    if len(recent) < max(2, (recent.maxlen or 0) // 2):
        return -math.inf
    mean = float(np.mean(recent))
    deviation = float(np.std(recent, ddof=1))
    # If a loss hardly changes, 0.1 % of it counts as its deviation.
    return (value - mean) / max(deviation, 1e-3 * abs(mean), 1e-30)

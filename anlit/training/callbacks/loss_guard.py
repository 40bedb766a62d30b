"""Skips steps whose loss or gradient is NaN or far too large."""

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


class LossGuard(L.Callback):
    """Checks the loss and gradient norm of every optimizer step before the optimizer's step.

    A step is bad if one of them is NaN or infinite, or more than `spike_sigmas` standard deviations above the mean of
    the last `window` good steps, once half as many have been seen (the rule of OLMo's skip-step optimizer). *Skip*
    drops the step's gradients: weights and optimizer state do not change, not even by weight decay. Data, schedule and
    step number continue. The count over the whole run is logged as `guard/skipped`, and a line names each bad step,
    whose loss stays in metrics.csv. The checkpoint has the guard's state. The host waits for the device once per step,
    and several ranks for an all-reduce of two numbers.

    Args:
        on_nan: What to do about a loss or gradient norm that is NaN or infinite.
        on_spike: What to do about one that is far too large.
        spike_sigmas: The number of standard deviations that is far too large.
        window: Number of good steps that a step is compared with.
        limit: The run ends if more of the last `window` steps than this were bad.
    """

    def __init__(
        self,
        on_nan: Literal["stop", "skip"] = "skip",
        on_spike: Literal["ignore", "skip"] = "ignore",
        spike_sigmas: float = 6.0,
        window: int = 128,
        limit: int = 10,
    ) -> None:
        if spike_sigmas <= 0 or window < 2 or limit < 0:
            given = f"spike_sigmas={spike_sigmas}, window={window}, limit={limit}"
            raise UserError(
                f"LossGuard has {given}: they must be above 0, at least 2 and at least 0"
            )
        self.on_nan, self.on_spike = on_nan, on_spike
        self.spike_sigmas, self.limit = spike_sigmas, limit
        self.losses, self.norms = deque[float](maxlen=window), deque[float](maxlen=window)
        self.recent_bad = deque[bool](maxlen=window)
        self.skipped = 0
        self._loss: Tensor | float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**{name: list(getattr(self, name)) for name in STATE}, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        for name in STATE:
            getattr(self, name).extend(state_dict[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.gradient_clip_algorithm == "value":
            raise UserError(
                "LossGuard needs the gradient norm: set trainer.gradient_clip_algorithm to norm"
            )

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        """Sum the losses of the micro-batches, each its share of the step's loss; see `StepLoss`."""
        self._loss = loss.detach() + self._loss

    def on_gradient_norm(self, trainer: L.Trainer, pl_module: Any, norm: Tensor) -> None:
        """Check the step: all micro-batches are done, and the optimizer has not used the gradients yet."""
        loss, self._loss = torch.as_tensor(self._loss).float() * pl_module.step_loss.factor, 0.0
        numbers = trainer.strategy.reduce(
            torch.stack([loss, norm.detach().to(loss)]), reduce_op="mean"
        ).tolist()
        if not (why := self.judge(*numbers)):
            return
        if too_many := (n_bad := sum(self.recent_bad)) > self.limit:
            why += f", and {n_bad} of the last {len(self.recent_bad)} steps were bad"
        if too_many or (self.on_nan == "stop" and not math.isfinite(sum(numbers))):
            raise divergence_error(trainer, f"at step {trainer.global_step} {why}")
        trainer.optimizers[0].zero_grad(set_to_none=True)  # so the optimizer skips all parameters
        for module in pl_module.modules():
            if isinstance(module, QKClip):
                module.reset_parameters()  # its record of the bad batch
        self.skipped += 1
        rank_zero_only(_log.warning)(f"step {trainer.global_step}: {why}, the step was skipped")

    def judge(self, loss: float, norm: float) -> str:
        """Record a step; returns why it is bad, "" for a good one. Ranks pass the same numbers and judge alike."""
        why = ""
        for what, value, recent in (
            ("gradient norm", norm, self.norms),
            ("loss", loss, self.losses),
        ):
            if not math.isfinite(value):
                why = f"{what} {value:.4g}"
            elif self.on_spike == "skip" and (above := sigmas(recent, value)) > self.spike_sigmas:
                why = f"{what} {value:.4g} is {above:.1f} standard deviations above the mean of recent steps"
        self.recent_bad.append(bool(why))
        if not why:
            self.losses.append(loss)
            self.norms.append(norm)
        return why

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if completes_step(trainer):
            pl_module.log("guard/skipped", torch.tensor(float(self.skipped)))  # kept on the host


def sigmas(recent: deque[float], value: float) -> float:
    """Standard deviations of `value` above the mean of recent ones; −∞ while less than half the window is filled."""
    if len(recent) < max(2, (recent.maxlen or 0) // 2):
        return -math.inf
    mean, spread = float(np.mean(recent)), float(np.std(recent, ddof=1))
    return (value - mean) / max(
        spread, 1e-3 * abs(mean), 1e-30
    )  # where a loss hardly changes, 0.1 % of it

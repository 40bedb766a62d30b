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

from anlit.attention.qk_clip import QKClip
from anlit.errors import UserError
from anlit.lightning_internals import completes_step
from anlit.training.callbacks.finite import divergence_error

_log = logging.getLogger(__name__)

LEAST_SPREAD = 1e-3
"""Lower limit of the standard deviation as a share of the mean, for a loss that hardly changes."""


def sigmas(recent: deque[float], value: float) -> float:
    """Standard deviations of `value` above the mean of recent ones; −∞ while less than half the window is filled."""
    if len(recent) < max(2, (recent.maxlen or 0) // 2):
        return -math.inf
    mean, spread = float(np.mean(recent)), float(np.std(recent, ddof=1))
    return (value - mean) / max(spread, LEAST_SPREAD * abs(mean), 1e-30)


class LossGuard(L.Callback):
    """Checks the loss and gradient norm of every optimizer step before the optimizer's step.

    A step is bad if one of them is NaN or infinite, or more than `spike_sigmas` standard deviations above the mean of
    the last `window` good steps, once half as many have been seen (the rule of OLMo's skip-step optimizer). *Skip*
    drops the step's gradients: weights and optimizer state do not change, not even by weight decay. Data, schedule and
    step number continue. The count over the whole run is logged as `guard/skipped`, and each bad step logs a line with
    its number in metrics.csv, whose `train/loss` keeps the value of the bad step. The checkpoint has the guard's state.

    The host waits for the device once per step. Several ranks also need an all-reduce of two numbers.

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
            raise UserError(
                f"LossGuard has spike_sigmas={spike_sigmas}, window={window}, limit={limit}: "
                "they must be above 0, at least 2 and at least 0"
            )
        self.on_nan, self.on_spike = on_nan, on_spike
        self.spike_sigmas, self.limit = spike_sigmas, limit
        self.losses: deque[float] = deque(maxlen=window)
        self.norms: deque[float] = deque(maxlen=window)
        self.recent_bad: deque[bool] = deque(maxlen=window)
        self.skipped = 0
        self._loss: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        recent = {name: list(getattr(self, name)) for name in ("losses", "norms", "recent_bad")}
        return {**recent, "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        for name in ("losses", "norms", "recent_bad"):
            getattr(self, name).extend(state_dict[name])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.gradient_clip_algorithm == "value":
            raise UserError("LossGuard needs the gradient norm: set trainer.gradient_clip_algorithm to norm")
        if trainer.precision == "16-mixed":
            raise UserError(
                "trainer.precision=16-mixed skips steps by itself: choose bf16-mixed, or leave LossGuard out"
            )

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Sum the losses of the micro-batches, each its share of the step's loss; see `StepLoss`."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def on_gradient_norm(self, trainer: L.Trainer, pl_module: L.LightningModule, norm: Tensor) -> None:
        """Check the step: all micro-batches are done, and the optimizer has not used the gradients yet."""
        assert self._loss is not None
        model: Any = pl_module
        loss = self._loss.float() * model.step_loss.factor
        self._loss = None
        numbers = torch.stack([loss, norm.detach().to(loss)])
        loss_now, norm_now = trainer.strategy.reduce(numbers, reduce_op="mean").tolist()
        action, why = self.judge(loss_now, norm_now)
        if action == "step":
            return
        n_bad = sum(self.recent_bad)
        if action == "stop" or n_bad > self.limit:
            many = "" if action == "stop" else f", and {n_bad} of the last {len(self.recent_bad)} steps were bad"
            raise divergence_error(trainer, f"at step {trainer.global_step} {why}{many}")
        trainer.optimizers[0].zero_grad(set_to_none=True)  # so the optimizer skips all parameters
        for module in pl_module.modules():
            if isinstance(module, QKClip):
                module.reset_parameters()  # its record of the bad batch
        self.skipped += 1
        rank_zero_only(_log.warning)(f"step {trainer.global_step}: {why}, the step was skipped")

    def judge(self, loss: float, norm: float) -> tuple[str, str]:
        """Record a step and decide what to do, and why: `step` (take it), `stop` or `skip`.

        Every rank passes the same numbers and gets the same answer.
        """
        action, why = "step", ""
        for what, value, recent in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            if not math.isfinite(value):
                action, why = self.on_nan, f"{what} {value:.4g}"
                break
            if self.on_spike == "skip" and not why and (above := sigmas(recent, value)) > self.spike_sigmas:
                why = f"{what} {value:.4g} is {above:.1f} standard deviations above the mean of recent steps"
                action = self.on_spike
        self.recent_bad.append(action != "step")
        if action == "step":
            self.losses.append(loss)
            self.norms.append(norm)
        return action, why

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if completes_step(trainer):
            pl_module.log("guard/skipped", torch.tensor(float(self.skipped)))  # kept on the host

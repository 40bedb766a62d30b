"""Another mechanism for a model that was trained with plain attention, brought in step by step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from anlit.nn.mechanisms.mechanism import Mechanism, MechanismWrapper


class WarmStart(MechanismWrapper):
    """Plain attention that becomes `mechanism` over the first optimizer steps of a run.

    With w from 0 to 1, saved with the weights, logits are (1 + w(a − 1))·(1 + w(g − 1))·S + w·m,
    where a, g and m are those of `mechanism`.

    Args:
        mechanism: The mechanism at the end, without a window.
        steps: The number of the optimizer step, from 1, that is the first with w = 1.
    """

    def __init__(self, mechanism: Mechanism, steps: int = 100) -> None:
        super().__init__(mechanism)
        if steps < 1:
            raise ValueError(f"WarmStart's steps must be at least 1, not {steps}")
        self.steps, self.share = steps, nn.Buffer(torch.zeros(()))

    def check(self) -> None:
        if (window := self.mechanism.window) is not None:
            raise ValueError(
                f"WarmStart's mechanism has a window, of {window} keys, which cannot grow step by step: leave it out, "
                "or put the WarmStart inside of the SlidingWindow"
            )

    def reset_parameters(self) -> None:
        self.share.zero_()

    def gain(self, n: Tensor) -> Tensor | None:
        return self._from(1, super().gain(n))

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return self._from(1, super().distance_gain(t))

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return self._from(0, super().distance_bias(t))

    def _from(self, start: float, end: Tensor | None) -> Tensor | None:
        return None if end is None else start + self.share.to(end.dtype) * (end - start)


def warm_starts(model: nn.Module) -> list[WarmStart]:
    return [module for module in model.modules() if isinstance(module, WarmStart)]


def grow(parts: Iterable[WarmStart], step: int) -> None:
    """Set w for optimizer step number `step`, from 1."""
    for part in parts:
        part.share.fill_(min(1.0, step / part.steps))

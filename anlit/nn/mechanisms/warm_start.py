"""Another mechanism for a model that was trained with plain attention, brought in step by step."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from anlit.nn.mechanisms.mechanism import Mechanism, MechanismWrapper


class WarmStart(MechanismWrapper):
    """Plain attention that becomes `mechanism` over the first optimizer steps of a run.

    Logits are (1 + w(a − 1))·(1 + w(g − 1))·S + w·m. a, g and m belong to `mechanism`. w rises from
    0 to 1, and is saved with the weights.

    Args:
        mechanism: The mechanism at the end, without a window.
        steps: The number of the optimizer step, from 1, that is the first with w = 1.
    """

    def __init__(self, mechanism: Mechanism, steps: int = 100) -> None:
        super().__init__(mechanism)
        if steps < 1:
            raise ValueError(f"WarmStart's steps must be at least 1, not {steps}")
        self.steps = steps
        self.share = nn.Buffer(torch.zeros(()))

    def check(self) -> None:
        window = self.mechanism.window
        if window is not None:
            raise ValueError(
                f"WarmStart's mechanism has a window, of {window} keys, which cannot grow step by "
                "step: leave it out, or put the WarmStart inside of the SlidingWindow"
            )

    def reset_parameters(self) -> None:
        self.share.zero_()

    def gain(self, n: Tensor) -> Tensor | None:
        return self._blend(1, super().gain(n))

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return self._blend(1, super().distance_gain(t))

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return self._blend(0, super().distance_bias(t))

    def _blend(self, start: float, end: Tensor | None) -> Tensor | None:
        """start + w·(end − start). None stays None."""
        return None if end is None else start + self.share.to(end.dtype) * (end - start)


def warm_starts(model: nn.Module) -> list[WarmStart]:
    """The warm starts of all layers."""
    return [module for module in model.modules() if isinstance(module, WarmStart)]


def grow(mechanisms: Iterable[WarmStart], step: int) -> None:
    """Set w for optimizer step number `step`, from 1."""
    for mechanism in mechanisms:
        mechanism.share.fill_(min(1.0, step / mechanism.steps))

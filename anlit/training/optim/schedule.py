"""Learning rate over a run: linear warm-up, then a cosine."""

import math
from dataclasses import dataclass

from anlit.config.schema import check_ranges


@dataclass(frozen=True)
class Schedule:
    """Warm-up over a share of the steps, then a cosine from the peak to `final` × the peak at the last step.

    Args:
        warmup: Share of the optimizer steps in which the rate rises linearly to the peak, in [0, 1).
        final: Rate at the last step as a share of the peak, 0 or more; [anGPT] uses 0.01.
    """

    warmup: float = 0.0
    final: float = 0.01

    def __post_init__(self) -> None:
        check_ranges("model.schedule", self)

    def factor(self, step: int, n_steps: int) -> float:
        """The multiple of the peak rate at optimizer step `step` (from 0) of `n_steps`."""
        n_warmup = round(self.warmup * n_steps)
        if step < n_warmup:
            return (step + 1) / n_warmup
        progress = min(1.0, (step - n_warmup) / max(1, n_steps - 1 - n_warmup))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2

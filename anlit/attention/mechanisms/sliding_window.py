"""Attention to the latest keys only (arXiv 2004.05150)."""

from torch import Tensor

from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.plain import Plain


class SlidingWindow(Mechanism):
    """Another mechanism over the `width` latest keys of the query's document, the query's own included.

    n counts the keys inside the window: a gain g(n) grows until the window is full.

    Args:
        width: How many keys a query may see.
        mechanism: The functions g, a, m inside the window.
    """

    def __init__(self, width: int = 128, mechanism: Mechanism = Plain()) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"SlidingWindow's width must be at least 1 key, not {width}")
        self.width = self.window = width
        self.mechanism = mechanism

    def check(self) -> None:
        if (inner := self.mechanism.window) is not None:
            raise ValueError(f"SlidingWindow's mechanism already has a window, of {inner} keys: name one width")

    @property
    def scales_with_distance(self) -> bool:
        return self.mechanism.scales_with_distance

    @property
    def shifts_with_distance(self) -> bool:
        return self.mechanism.shifts_with_distance

    def gain(self, n: Tensor) -> Tensor | None:
        return self.mechanism.gain(n)

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return self.mechanism.distance_gain(t)

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return self.mechanism.distance_bias(t)

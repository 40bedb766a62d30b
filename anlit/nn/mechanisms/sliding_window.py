"""Attention to the latest keys only (arXiv 2004.05150)."""

from anlit.nn.mechanisms.mechanism import Mechanism, MechanismWrapper
from anlit.nn.mechanisms.plain import Plain


class SlidingWindow(MechanismWrapper):
    """Another mechanism over the `width` latest keys of the query's document, with the query's key.

    n counts the keys inside the window. A gain g(n) grows until the window is full.

    Args:
        width: How many keys a query may see.
        mechanism: The functions g, a, m inside the window.
    """

    def __init__(self, width: int = 128, mechanism: Mechanism = Plain()) -> None:
        super().__init__(mechanism)
        if width < 1:
            raise ValueError(f"SlidingWindow's width must be at least 1 key, not {width}")
        self.width = width
        self.window = width

    def check(self) -> None:
        inner_window = self.mechanism.window
        if inner_window is not None:
            raise ValueError(
                f"SlidingWindow's mechanism already has a window, of {inner_window} keys: "
                "name one width"
            )

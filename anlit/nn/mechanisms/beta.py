"""Logits that grow as a power of the number of keys, as on the sphere ([NOR], arXiv 2605.08505)."""

from torch import Tensor

from anlit.nn.mechanisms.coefficient import Coefficient, Learned
from anlit.nn.mechanisms.mechanism import Mechanism


class BetaScaling(Mechanism):
    """g(n) = s·n^{2/(d_head−1)}.

    For q and k uniform on a sphere (1 + cos(q, k))/2 has the distribution Beta((d_head−1)/2,
    (d_head−1)/2). The largest of n cosines differs from 1 by about n^{−2/(d_head−1)}. Its gap to
    the next shrinks alike. For n ≫ e^{d_head} a slower growth loses the weight on the largest. At
    d_head = 64 and n = 10⁵ the gain is only 1.44. There √(2 ln n) describes the scores better.

    Args:
        s: Strength. 1, our choice, gives g(1) = 1.
        learned: Whether s is learned.
    """

    def __init__(self, s: float = 1.0, learned: Learned = "never") -> None:
        super().__init__()
        self.s = s
        self.learned = learned
        self.strength = Coefficient(s, learned)

    def check(self) -> None:
        if self.d_head < 2:
            raise ValueError(
                "BetaScaling needs a d_head (default d_model/n_heads) of at least 2, "
                f"not {self.d_head}"
            )

    def gain(self, n: Tensor) -> Tensor:
        return self.strength() * n ** (2 / (self.d_head - 1))

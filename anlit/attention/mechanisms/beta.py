"""Logits that grow as a power of the number of keys, as on the sphere ([NOR], and arXiv 2605.08505)."""

from torch import Tensor

from anlit.attention.coefficient import Coefficient, Learned
from anlit.attention.mechanism import Mechanism


class BetaScaling(Mechanism):
    """g(n) = s·n^{2/(d_head−1)}.

    For q and k uniform on a sphere, q·k is not normal but bounded: (1 + cos(q, k))/2 has the distribution
    Beta((d_head−1)/2, (d_head−1)/2). The largest of n cosines comes as near to 1 as n^{−2/(d_head−1)}, and the gap to
    the next shrinks alike. So far out, n ≫ e^{d_head}, this and no slower growth keeps the weight on the largest;
    at d_head = 64 and n = 10⁵ it is a factor of 1.44, and √(2 ln n) describes the scores better.

    Args:
        s: The constant, which the exponent leaves open: 1, our choice, leaves a first key as it is. The gain of
            GPT+'s QK-norm and nGPT's s_qk can learn another; anGPT has no such parameter.
        learned: Whether s is learned.
    """

    def __init__(self, s: float = 1.0, learned: Learned = "never") -> None:
        super().__init__()
        self.s, self.learned = s, learned
        self.strength = Coefficient(s, learned)

    def gain(self, n: Tensor) -> Tensor:
        return self.strength() * n ** (2 / (self.d_head - 1))

"""The mechanisms that benchmarks name."""

from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.alibi import ALiBi
from anlit.attention.mechanisms.log_bias import LogBias
from anlit.attention.mechanisms.log_n import LogN
from anlit.attention.mechanisms.plain import Plain
from anlit.attention.mechanisms.scale_invariant import ScaleInvariant
from anlit.attention.mechanisms.sliding_window import SlidingWindow

MECHANISMS: dict[str, Mechanism] = {
    "plain": Plain(),
    "log-n": LogN(learned="never"),
    "scale-invariant": ScaleInvariant(),
    "scale-invariant-learned": ScaleInvariant(learned="per_layer"),
    "log-bias": LogBias(),
    "alibi": ALiBi(),
    "window": SlidingWindow(1024),
    "window-scale-invariant": SlidingWindow(1024, ScaleInvariant()),
}

"""One file per attention mechanism; the list of what YAML's `attention:` may name by its short class name."""

from anlit.attention.mechanisms.plain import Plain
from anlit.attention.mechanisms.scale_invariant import ScaleInvariant

__all__ = ["Plain", "ScaleInvariant"]

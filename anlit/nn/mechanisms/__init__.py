"""One file per attention mechanism. Every `Mechanism` in a file of this folder is available by
name, here and as `anlit.<Name>`. To add one, write a file here and, for others to use it, a YAML
fragment in configs/attention/."""

from anlit.config.registry import classes_in
from anlit.nn.mechanisms.mechanism import Mechanism

_FOUND = classes_in(__name__, __path__, Mechanism)
globals().update(_FOUND)
__all__ = list(_FOUND)

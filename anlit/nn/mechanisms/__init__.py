"""Attention mechanisms, a file each.

A `Mechanism` in a file of this folder is available by name, here and as `anlit.<Name>`. To add a
mechanism, write a file here. Users find it by a YAML fragment in configs/attention/.
"""

from anlit.config.registry import classes_in
from anlit.nn.mechanisms.mechanism import Mechanism

_MECHANISMS = classes_in(__name__, __path__, Mechanism)
globals().update(_MECHANISMS)
__all__ = list(_MECHANISMS)

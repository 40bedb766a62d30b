"""One concern per file.

Every callback in a file of this folder is available by name, here and in a configuration as
`anlit.training.callbacks.<Name>`. `anlit/commands/fit.py` lists the callbacks that every run has.

Each class sets `changes_learning`: whether runs with it belong to another configuration than runs
without it. Reports read it from the source (`anlit/runs/callbacks.py`).
"""

from lightning import Callback

from anlit.config.registry import classes_in

_CALLBACKS = classes_in(__name__, __path__, Callback)
globals().update(_CALLBACKS)
__all__ = list(_CALLBACKS)

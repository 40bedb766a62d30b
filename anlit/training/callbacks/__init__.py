"""One concern per file.

Every callback in a file of this folder is available here by name. A configuration names it
`anlit.training.callbacks.<Name>`. `anlit/commands/fit.py` lists the callbacks that every run has.

Each class sets `changes_learning`. It says whether runs with it belong to another configuration
than runs without it. Reports read it from the source (`anlit/runs/callbacks.py`).
"""

from lightning import Callback

from anlit.config.registry import classes_in

_CALLBACKS = classes_in(__name__, __path__, Callback)
globals().update(_CALLBACKS)
__all__ = list(_CALLBACKS)

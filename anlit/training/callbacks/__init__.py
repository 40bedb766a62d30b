"""One concern per file.

Every callback in a file of this folder is available by name, here and in a configuration as
`anlit.training.callbacks.<Name>`. `anlit/commands/fit.py` lists the callbacks that every run has.
"""

from lightning import Callback

from anlit.config.registry import classes_in

_CALLBACKS = classes_in(__name__, __path__, Callback)
globals().update(_CALLBACKS)
__all__ = list(_CALLBACKS)

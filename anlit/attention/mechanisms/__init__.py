"""One file per attention mechanism. Every `Mechanism` in a file of this folder is available by name, here and as
`anlit.<Name>`. To add one, write a file here and, for others to use it, a YAML fragment in configs/attention/."""

import inspect
import pkgutil
from importlib import import_module

from anlit.attention.mechanism import Mechanism

__all__: list[str] = []

for _file in pkgutil.iter_modules(__path__):
    _module = import_module(f"{__name__}.{_file.name}")
    for _name, _class in inspect.getmembers(_module, inspect.isclass):
        if issubclass(_class, Mechanism) and _class.__module__ == _module.__name__:
            globals()[_name] = _class
            __all__ += [_name]

"""Lightning imports all of torchmetrics and needs two of its classes.

Its package pulls in scipy.signal, and transformers and torchvision where they are installed: a third of the processor
time of `anlit fit --help`. Here the package is a module that loads itself when something else is asked of it.
"""

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

NAME = "torchmetrics"
HOMES = {
    "Metric": "metric", "MetricCollection": "collections", "__version__": "__about__",
}  # fmt: skip
"""What Lightning takes from it → the submodule that has it."""


def make_torchmetrics_lazy() -> None:
    """Let `import torchmetrics` load what is asked of it; without effect where it is imported already."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is not None and spec.loader is not None:
        package = importlib.util.module_from_spec(spec)
        vars(package).update(
            _logger=logging.getLogger(NAME), __getattr__=lambda name: _attribute(package, name)
        )
        sys.modules[NAME] = package


def _attribute(package: ModuleType, name: str) -> Any:
    """An attribute that the package does not have yet; if it is in no part that is known, the package is loaded."""
    if name.startswith("__") and name not in HOMES:  # what importlib and inspect look for
        raise AttributeError(name)
    try:
        if name != "__version__":
            importlib.import_module(
                f"{NAME}.utilities"
            )  # first: its parts import each other in a circle
        value = getattr(importlib.import_module(f"{NAME}.{HOMES[name]}"), name)
    except (KeyError, ImportError, AttributeError):
        vars(package).pop("__getattr__", None)
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        value = getattr(package, name)
    return vars(package).setdefault(name, value)

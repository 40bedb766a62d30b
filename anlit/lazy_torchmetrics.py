"""Lightning imports all of torchmetrics and needs two of its classes.

Its package pulls in scipy.signal, and transformers and torchvision where they are installed: a third of the processor
time that `anlit fit --help` took. Here the package is a module that reads its own content when something
else is asked of it.
"""

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

NAME = "torchmetrics"
HOMES = {
    "Metric": "metric", "MetricCollection": "collections", "MeanMetric": "aggregation", "__version__": "__about__",
}  # fmt: skip
"""What Lightning and we take from it → the submodule that has it."""


def make_torchmetrics_lazy() -> None:
    """Let `import torchmetrics` load what is asked of it; without effect where it is imported already.

    A version of torchmetrics that cannot be loaded in parts is loaded whole.
    """
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__dict__["_logger"] = logging.getLogger(NAME)
    package.__dict__["__getattr__"] = lambda name: _attribute(package, name)
    sys.modules[NAME] = package


def _attribute(package: ModuleType, name: str) -> Any:
    """An attribute that the package does not have yet."""
    if name in HOMES:
        try:
            return _of_part(package, name)
        except (ImportError, AttributeError):  # another version, in other parts
            pass
    elif name.startswith("__"):  # what importlib and inspect look for
        raise AttributeError(name)
    package.__dict__.pop("__getattr__", None)
    assert package.__spec__ is not None
    assert package.__spec__.loader is not None
    package.__spec__.loader.exec_module(package)
    return getattr(package, name)


def _of_part(package: ModuleType, name: str) -> Any:
    if name != "__version__":
        importlib.import_module(f"{NAME}.utilities")  # first: its parts import each other in a circle
    found = getattr(importlib.import_module(f"{NAME}.{HOMES[name]}"), name)
    package.__dict__[name] = found
    return found

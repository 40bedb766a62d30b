"""Lightning imports all of torchmetrics and needs two of its classes.

Its package pulls in scipy.signal, and transformers and torchvision where they are installed: a third of the processor
time of `anlit fit --help`. Here the package is a module that loads itself when something else is asked of it. The two
classes import matplotlib, an eighth of that time, for their method `plot`, which is left out.
"""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
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
            _leave_out_plots(package)
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


def _leave_out_plots(package: ModuleType) -> None:
    """Let the package find no matplotlib where it looks for what is installed, unless it has looked already."""
    name = f"{NAME}.utilities.imports"
    file = Path(package.__path__[0], "utilities", "imports.py")
    if name in sys.modules or not file.is_file():
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    vars(sys.modules[name])["_MATPLOTLIB_AVAILABLE"] = False

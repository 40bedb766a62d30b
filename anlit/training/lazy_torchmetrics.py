"""Lets Lightning import two classes of torchmetrics without the whole package.

The package imports scipy.signal, and transformers and torchvision if they are installed: a third
of the processor time of `anlit fit --help`. Here the package is a module that loads the rest on
demand. The two classes import matplotlib, an eighth of that time, for their method `plot`; this
import is left out.
"""

import importlib
import importlib.util
import logging
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torchmetrics"
SUBMODULES = {
    "Metric": "metric",
    "MetricCollection": "collections",
    "__version__": "__about__",
}
"""A name that Lightning imports → the submodule of the package that defines it."""


def make_torchmetrics_lazy() -> None:
    """Let `import torchmetrics` load only what is used. Without effect after an import."""
    spec = None if NAME in sys.modules else importlib.util.find_spec(NAME)
    if spec is not None and spec.loader is not None:
        package = importlib.util.module_from_spec(spec)
        vars(package)["_logger"] = logging.getLogger(NAME)
        vars(package)["__getattr__"] = partial(_load_attribute, package)
        sys.modules[NAME] = package


def _load_attribute(package: ModuleType, name: str) -> Any:
    """Load an attribute from its submodule; load the whole package for all other names."""
    if name.startswith("__") and name not in SUBMODULES:  # importlib and inspect ask for them
        raise AttributeError(name)
    try:
        if name != "__version__":
            _leave_out_plots(package)
            # First, because its modules import each other in a circle.
            importlib.import_module(f"{NAME}.utilities")
        value = getattr(importlib.import_module(f"{NAME}.{SUBMODULES[name]}"), name)
    except (KeyError, ImportError, AttributeError):
        vars(package).pop("__getattr__", None)
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        value = getattr(package, name)
    return vars(package).setdefault(name, value)


def _leave_out_plots(package: ModuleType) -> None:
    """Let the package find no matplotlib, unless it has looked for it already."""
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

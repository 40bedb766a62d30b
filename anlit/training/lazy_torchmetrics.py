"""Lets Lightning import two classes of torchmetrics without the whole package.

The whole package imports scipy.signal, and also transformers and torchvision if they are installed.
This is a third of the processor time of `anlit fit --help`. The two classes alone import
matplotlib, a tenth of it. `make_torchmetrics_lazy` puts an empty module in the place of the
package, and another in the place of its plots. Both load attributes on demand.
"""

import importlib
import importlib.util
import logging
import sys
from functools import partial
from types import ModuleType
from typing import Any

PACKAGE_NAME = "torchmetrics"
SUBMODULES = {
    "Metric": "metric",
    "MetricCollection": "collections",
    "__version__": "__about__",
}
"""Each name that Lightning imports → the submodule of the package that defines it.

If a version of torchmetrics lacks an entry, the whole package is loaded. This costs time only.
"""
PLOTS_NAME = f"{PACKAGE_NAME}.utilities.plot"
"""The module that imports matplotlib."""


def make_torchmetrics_lazy() -> None:
    """Let `import torchmetrics` load only what is used.

    Nothing changes if torchmetrics is imported already or not installed.
    """
    spec = None if PACKAGE_NAME in sys.modules else importlib.util.find_spec(PACKAGE_NAME)
    if spec is not None and spec.loader is not None:
        package = importlib.util.module_from_spec(spec)
        # Its submodules import `_logger` from the package itself.
        vars(package)["_logger"] = logging.getLogger(PACKAGE_NAME)
        vars(package)["__getattr__"] = partial(_load_attribute, package)
        sys.modules[PACKAGE_NAME] = package
        sys.modules[PLOTS_NAME] = _lazy_plots()


def _lazy_plots() -> ModuleType:
    """A module with the names that the two classes import. Other names load the real module."""
    plots = ModuleType(PLOTS_NAME)
    members: dict[str, Any] = {
        "_AX_TYPE": object,  # types in annotations
        "_PLOT_OUT_TYPE": object,
        "plot_single_or_multi_val": _plot,
        "__getattr__": _load_plots_attribute,
    }
    vars(plots).update(members)
    return plots


def _plot(*args: Any, **kwargs: Any) -> Any:
    return _load_plots_attribute("plot_single_or_multi_val")(*args, **kwargs)


def _load_plots_attribute(name: str) -> Any:
    if name.startswith("__"):  # importlib and inspect ask for them
        raise AttributeError(name)
    if "__file__" not in vars(sys.modules[PLOTS_NAME]):
        del sys.modules[PLOTS_NAME]
    return getattr(importlib.import_module(PLOTS_NAME), name)


def _load_attribute(package: ModuleType, name: str) -> Any:
    """Load an attribute from its submodule; load the whole package for all other names."""
    if name.startswith("__") and name not in SUBMODULES:  # importlib and inspect ask for them
        raise AttributeError(name)
    try:
        if name != "__version__":
            # `utilities` comes first: torchmetrics' modules import each other in a circle.
            importlib.import_module(f"{PACKAGE_NAME}.utilities")
        value = getattr(importlib.import_module(f"{PACKAGE_NAME}.{SUBMODULES[name]}"), name)
    except (KeyError, ImportError, AttributeError):
        # Not in SUBMODULES, or another version has it elsewhere: load the whole package.
        vars(package).pop("__getattr__", None)
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
        value = getattr(package, name)
    return vars(package).setdefault(name, value)

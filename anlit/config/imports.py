"""Why a dotted path leads to no class, in words."""

import re
from importlib import import_module
from importlib.util import find_spec
from pydoc import locate
from typing import Any

DOTTED_PATH = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
"""A path such as `mylab.PowerBias`."""


def import_failure(path: str) -> str:
    """Return what importing the module of a path raises; "" if nothing."""
    module = path.rpartition(".")[0]
    try:
        if locate(path) is None:
            import_module(module)
    except Exception as error:
        cause: Any = getattr(error, "value", error)  # of pydoc's ErrorDuringImport
        return f"importing {module} fails ({type(cause).__name__}: {cause})"
    return ""


def is_broken(path: str) -> bool:
    """Whether the path begins with a module that is there and cannot be imported."""
    return _is_there(path.partition(".")[0]) and bool(import_failure(path))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ValueError:  # `__main__` is there and has no spec
        return False


def path_problem(path: str) -> str:
    """Return why a path leads to nothing; "" if it leads to something, or is not a dotted path."""
    if not DOTTED_PATH.fullmatch(path):
        return ""
    module, _, name = path.rpartition(".")
    return import_failure(path) or ("" if locate(path) else f"{module} has no {name}")

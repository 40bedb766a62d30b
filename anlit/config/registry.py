"""Finds classes by the folder that they lie in, so that adding one is adding a file."""

import inspect
import pkgutil
from collections.abc import Iterable
from importlib import import_module


def classes_in(package: str, folders: Iterable[str], base: type) -> dict[str, type]:
    """Name → class, for each class of `base` that a file of the package (its name, its `__path__`) defines.

    Classes in the file of `base` itself are left out.
    """
    files = [public_classes(f"{package}.{file.name}") for file in pkgutil.iter_modules(folders)]
    return {
        name: kind
        for file in files
        for name, kind in file.items()
        if issubclass(kind, base) and kind.__module__ != base.__module__
    }


def public_classes(module: str) -> dict[str, type]:
    """Name → class, for what `__all__` of a module lists; without one, for each public class that it defines."""
    members = vars(import_module(module))
    defined = [
        name
        for name, kind in members.items()
        if inspect.isclass(kind) and kind.__module__ == module
    ]
    return {
        name: members[name]
        for name in members.get("__all__") or defined
        if not name.startswith("_")
    }

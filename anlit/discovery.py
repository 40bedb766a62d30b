"""Finds classes by the folder that they lie in, so that adding one is adding a file."""

import inspect
import pkgutil
from collections.abc import Iterable
from importlib import import_module


def classes_in(package: str, folders: Iterable[str], base: type) -> dict[str, type]:
    """Name → class, for each class of `base` that a file of the package defines.

    Args:
        package: Its dotted name.
        folders: Its `__path__`.
        base: What the classes derive from.
    """
    files = [import_module(f"{package}.{file.name}") for file in pkgutil.iter_modules(folders)]
    return {name: kind for file in files for name, kind in classes_of(file.__name__, base).items()}


def classes_of(module: str, base: type = object) -> dict[str, type]:
    """Name → class, in the order of the file, for each public class that it defines and that derives from `base`."""
    defined = {name: kind for name, kind in vars(import_module(module)).items() if inspect.isclass(kind)}
    own = [(name, kind) for name, kind in defined.items() if kind.__module__ == module and not name.startswith("_")]
    return {name: kind for name, kind in own if issubclass(kind, base) and kind is not base}


def public_classes(module: str) -> dict[str, type]:
    """Name → class, for what `__all__` of a module lists; without one, for each public class that it defines."""
    names = getattr(import_module(module), "__all__", ())
    return {name: getattr(import_module(module), name) for name in names} or classes_of(module)

"""Finds classes by their folder: a new class needs a new file and nothing else."""

import ast
import inspect
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any


def classes_in(package: str, folders: Iterable[str], base: type) -> dict[str, type]:
    """Name → class, for the classes of `base` that the files of a package define.

    `package` is its name, `folders` its `__path__`. Classes in the file of `base` itself are left
    out.
    """
    classes = {}
    for file in pkgutil.iter_modules(folders):
        for name, kind in public_classes(f"{package}.{file.name}").items():
            if issubclass(kind, base) and kind.__module__ != base.__module__:
                classes[name] = kind
    return classes


def public_classes(module: str) -> dict[str, type]:
    """Name → class, for `__all__` of a module or, without it, its public classes."""
    members = vars(import_module(module))
    names = members.get("__all__")
    if names is None:
        names = [name for name, member in members.items() if _is_defined_in(module, member)]
    return {name: members[name] for name in names if not name.startswith("_")}


def _is_defined_in(module: str, member: Any) -> bool:
    return inspect.isclass(member) and member.__module__ == module


def class_constants(files: Iterable[Path], name: str) -> dict[str, Any]:
    """Class → the constant that its body assigns to `name`, for the classes in these files.

    The files are read and not imported.
    """
    constants: dict[str, Any] = {}
    for file in files:
        for definition in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(definition, ast.ClassDef):
                constants |= _constants_of(definition, name)
    return constants


def _constants_of(definition: ast.ClassDef, name: str) -> dict[str, Any]:
    for statement in definition.body:
        match statement:
            case ast.Assign([ast.Name(id=target)], ast.Constant(value)) if target == name:
                return {definition.name: value}
    return {}

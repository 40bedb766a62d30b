"""Converts objects to settings of plain values, and builds the objects again.

Checkpoints, exported folders and a run's config.yaml name classes, and such files may come from anyone. So nothing here
imports or calls what a file names. An object is made only of a class that is already imported and is a subclass of the
constructor's annotation; its arguments are checked in the same way. A user's own class is imported with
`anlit … --import MODULE`.
"""

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from jsonargparse._parameter_resolvers import get_signature_parameters
from torch import nn

from anlit.errors import UserError

T = TypeVar("T")
SCALARS = (bool, int, float, str, type(None))
LONGEST_NAME = 100
"""Characters of a foreign name in a message."""
LARGEST_NUMBER = 2**1000
"""Above every integer that may become a float."""


class Configured:
    """An object that a configuration describes by class and arguments; attributes are named like its arguments."""


DESCRIBED = (nn.Module, Configured)


def made_real(value: Any) -> Any:
    """Return the object that a lazy default of the parser stands for; any other value unchanged.

    The parser can write default objects into a config.yaml only as lazy instances.
    """
    if not hasattr(type(value), "lazy_get_init_args"):
        return value
    _, _, kind, *_ = type(value).__mro__  # after jsonargparse's lazy class and mixin
    return kind(**value.lazy_get_init_args().as_dict())


def to_plain_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments as plain values, in the form that the command line stores.

    A model that was built in Python has instances; each becomes its class and the attributes named like its arguments.
    Functions, such as one that makes the optimizer, cannot be stored and are left out. So are Lightning's own entries,
    whose names begin with an underscore.
    """
    return {
        name: _plain(value)
        for name, value in arguments.items()
        if not name.startswith("_") and (isinstance(value, DESCRIBED) or not callable(value))
    }


def module_to_plain_values(part: nn.Module | Configured) -> dict[str, Any]:
    """A described object as its class and the attributes named like its arguments."""
    arguments = {name: getattr(part, name) for name in _annotations(type(part))}
    return {"class_path": _path_of(type(part)), "init_args": to_plain_values(arguments)}


def _plain(value: Any) -> Any:
    value = made_real(value)
    if isinstance(value, DESCRIBED):
        return module_to_plain_values(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def build_from_plain(kind: type[T], arguments: Mapping[str, Any], where: str) -> T:
    """An object of `kind` from plain values, the inverse of `to_plain_values`.

    Args:
        kind: A class that the caller trusts. Its annotations decide which other classes may be used.
        where: The file and the key, for messages.

    Raises:
        UserError: An argument is unknown, of the wrong type, or names a class that may not be used.
        ValueError: The class refuses a value.
    """
    known = _annotations(kind)
    if unknown := [name for name in arguments if name not in known]:
        raise UserError(
            f"{where} has {shown(unknown[0])}, which is not a setting of {kind.__name__}: remove it"
        )
    return kind(
        **{
            name: _convert(known[name], value, kind, f"{where}.{name}")
            for name, value in arguments.items()
        }
    )


def subclass_named(base: type[T], path: str, where: str) -> type[T]:
    """The imported subclass of `base` that a file names, by its dotted path or its bare name.

    Raises UserError if there is none, or there are several.
    """
    package, name = path.partition(".")[0], path.rpartition(".")[2]
    family = [base]
    for kind in family:
        family += [child for child in kind.__subclasses__() if child not in family]
    classes = [kind for kind in family if kind.__name__ == name]
    if (
        "." in path
    ):  # a package may offer the class under a shorter path, so the package and the name are enough
        exact = [kind for kind in classes if _path_of(kind) == path]
        classes = exact or [
            kind for kind in classes if kind.__module__.partition(".")[0] == package
        ]
    if len(classes) == 1:
        return classes[0]
    raise UserError(
        f"{where} names {shown(path)}, which is {'several' if classes else 'no'} {base.__name__} of anlit or of an "
        "imported module, so nothing is made of it: if it is yours, add --import with the module that defines it"
    )


def shown(name: Any) -> str:
    """A name from a file, quoted and shortened for messages."""
    text = repr(name)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def parameters_of(kind: type) -> list[Any]:
    """The arguments of a constructor, each with `name`, `annotation` and `default`, also those behind **kwargs."""
    return list(get_signature_parameters(kind, None))


def _annotations(kind: type) -> dict[str, Any]:
    empty = inspect.Parameter.empty
    return {p.name: Any if p.annotation is empty else p.annotation for p in parameters_of(kind)}


def _convert(annotation: Any, value: Any, owner: type, where: str) -> Any:
    """`value` as the type of `annotation`, for an argument of `owner`. Of a union None is tried first."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for choice in (choices := sorted(inner, key=lambda choice: choice is not type(None))):
            try:
                return _convert(choice, value, owner, where)
            except UserError:
                if choice is choices[-1]:
                    raise
    if (
        annotation is Any or (annotation in (list, dict) and isinstance(value, annotation))
    ) and is_plain(value):
        return value
    if origin is Literal and any(
        value == choice and type(value) is type(choice) for choice in inner
    ):
        return value
    if annotation is float and type(value) is int and abs(value) < LARGEST_NUMBER:
        return float(value)
    if annotation in (*SCALARS, None) and type(value) is (annotation or type(None)):
        return value
    if origin in (list, Sequence) and isinstance(value, list):
        return [
            _convert(inner[0], part, owner, f"{where}.{number}")
            for number, part in enumerate(value)
        ]
    if (
        origin is tuple
        and isinstance(value, list | tuple)
        and (len(value) == len(inner) or inner[-1] is ...)
    ):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        return tuple(
            _convert(kind, part, owner, where) for kind, part in zip(kinds, value, strict=True)
        )
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {
            _convert(inner[0], k, owner, where): _convert(inner[1], v, owner, where)
            for k, v in value.items()
        }
    if _is_ours(annotation, owner) and isinstance(value, str | dict):
        return _build_part(annotation, value, where)
    kind = (
        annotation.__name__
        if isinstance(annotation, type)
        else str(annotation).replace("typing.", "")
    )
    raise UserError(
        f"{where} is {shown(value)}, which cannot be read as {kind}: give another value"
    )


def _build_part(base: type, value: str | dict[str, Any], where: str) -> Any:
    """A module of the network or a dataclass, from a name, {class_path, init_args}, or the arguments alone."""
    spec: dict[str, Any] = {"class_path": value} if isinstance(value, str) else value
    if "class_path" not in spec:
        return build_from_plain(base, spec, where)
    path, arguments = spec["class_path"], spec.get("init_args", {})
    if (
        not isinstance(path, str)
        or not isinstance(arguments, dict)
        or spec.keys() - {"class_path", "init_args"}
    ):
        raise UserError(
            f"{where} is {shown(value)}: give class_path and init_args, and nothing else"
        )
    return build_from_plain(subclass_named(base, path, where), arguments, where)


def _is_ours(annotation: Any, owner: type) -> bool:
    """Whether objects of this type may be made for an argument of `owner`: a class of anlit or of owner's package."""
    if not isinstance(annotation, type) or not (
        issubclass(annotation, DESCRIBED) or is_dataclass(annotation)
    ):
        return False
    return annotation.__module__.partition(".")[0] in ("anlit", owner.__module__.partition(".")[0])


def is_plain(value: Any) -> bool:
    """Whether it has numbers and texts only, and describes no object."""
    if isinstance(value, dict):
        return "class_path" not in value and all(
            is_plain(part) for part in (*value, *value.values())
        )
    return (
        all(is_plain(part) for part in value)
        if isinstance(value, list)
        else isinstance(value, SCALARS)
    )

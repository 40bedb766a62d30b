"""Converts objects to settings of plain values, and builds the objects again.

Checkpoints, exported folders and a run's config.yaml name classes, and such files may come from
anyone. So nothing here imports or calls what a file names. An object is made only of an imported
class that is a subclass of the constructor's annotation. Its arguments are checked in the same way.
A user's own class is imported with `anlit … --import MODULE`.
"""

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse.typing import _LazyInitBaseClass
from torch import nn

from anlit.errors import UserError

T = TypeVar("T")
SCALARS = (bool, int, float, str, type(None))
LONGEST_NAME = 100
"""Characters of a foreign name in a message."""
LARGEST_NUMBER = 2**1000
"""Above every integer that may become a float."""


class Configured:
    """An object that a configuration describes by class and arguments.

    Its attributes are named like its arguments.
    """


DESCRIBED = (nn.Module, Configured)
"""Classes of objects that plain values describe."""


def lazy_default(kind: type[T], **arguments: Any) -> T:
    """Make a default object of a setting, in the one form that the parser writes to config.yaml.

    `jsonargparse.lazy_instance` does this too. But for every default it reads the source of each
    function that waits for an import.
    """
    methods = {"__reduce__": _reduce_to_real, "__deepcopy__": _share}
    lazy_kind = type(f"LazyInstance_{kind.__name__}", (_LazyInitBaseClass, kind), methods)
    return lazy_kind(kind, arguments)


def _reduce_to_real(value: Any) -> tuple[Any, ...]:
    """Pickle the object that a `lazy_default` stands for, because no module has the lazy class."""
    return partial(_kind_of_lazy(value), **value.lazy_get_init_args().as_dict()), ()


def _share(value: Any, memo: dict[int, Any]) -> Any:
    """Return the default itself as its deep copy, because defaults never change."""
    return value


def _kind_of_lazy(value: Any) -> type:
    """The class of the object that a `lazy_default` stands for."""
    _, _, kind, *_ = type(value).__mro__  # after the lazy class and jsonargparse's mixin
    return kind


def made_real(value: Any) -> Any:
    """Return the object that a `lazy_default` stands for; any other value unchanged."""
    if not hasattr(type(value), "lazy_get_init_args"):
        return value
    return _kind_of_lazy(value)(**value.lazy_get_init_args().as_dict())


def to_plain_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Constructor arguments as plain values, in the form that the command line stores.

    A model that was built in Python has instances. Each becomes its class and the attributes named
    like its arguments. Functions, such as a factory of optimizers, cannot be stored and are left
    out. So are entries of Lightning, which begin with an underscore.
    """
    values = {}
    for name, value in arguments.items():
        is_function = callable(value) and not isinstance(value, DESCRIBED)
        if not name.startswith("_") and not is_function:
            values[name] = _plain(value)
    return values


def module_to_plain_values(described: nn.Module | Configured) -> dict[str, Any]:
    """A described object as its class and the attributes named like its arguments."""
    kind = type(described)
    arguments = {name: getattr(described, name) for name in annotations_of(kind)}
    return {"class_path": class_path_of(kind), "init_args": to_plain_values(arguments)}


def _plain(value: Any) -> Any:
    value = made_real(value)
    if isinstance(value, DESCRIBED):
        return module_to_plain_values(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def build_from_plain(kind: type[T], arguments: Mapping[str, Any], location: str) -> T:
    """An object of `kind` from plain values, the inverse of `to_plain_values`.

    Args:
        kind: A class that the caller trusts. Its annotations decide which other classes may be
            used.
        location: The file and the key, for messages.

    Raises:
        UserError: An argument is unknown, of the wrong type, or names a class that may not be used.
        ValueError: The class refuses a value.
    """
    annotations = annotations_of(kind)
    unknown = [name for name in arguments if name not in annotations]
    if unknown:
        fault = f"{shown(unknown[0])}, which is not a setting of {kind.__name__}"
        raise UserError(f"{location} has {fault}: remove it")
    values = {}
    for name, value in arguments.items():
        values[name] = _convert(annotations[name], value, kind, f"{location}.{name}")
    return kind(**values)


def subclass_named(base: type[T], path: str, location: str) -> type[T]:
    """The imported subclass of `base` that a file names, by its dotted path or its bare name.

    Raises UserError if there is none, or there are several.
    """
    family = [base]
    for kind in family:
        family += [child for child in kind.__subclasses__() if child not in family]
    name = path.rpartition(".")[2]
    classes = [kind for kind in family if kind.__name__ == name]
    exact = [kind for kind in classes if path in (class_path_of(kind), recorded_name(kind))]
    if exact:
        classes = exact
    elif path.startswith("__main__."):
        # The class was in a script or notebook, which another module may now define.
        classes = [kind for kind in classes if not is_of_anlit(kind)]
    elif "." in path:
        # A package may offer the class under a shorter path: then package and name are enough.
        package = path.partition(".")[0]
        classes = [kind for kind in classes if _package_of(kind) == package]
    if len(classes) == 1:
        return classes[0]
    number = "several" if classes else "no"
    raise UserError(
        f"{location} names {shown(path)}, which is {number} {base.__name__} of anlit or of an "
        "imported module, so nothing is made of it: if it is yours, add --import with the module "
        "that defines it"
    )


def shown(name: Any) -> str:
    """A name from a file, quoted and shortened for messages."""
    text = repr(name)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


def class_path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def recorded_name(kind: type) -> str:
    """The name of a model's class in a checkpoint: `GPT` of anlit, the dotted path of others."""
    return kind.__name__ if is_of_anlit(kind) else class_path_of(kind)


def is_of_anlit(kind: type) -> bool:
    return _package_of(kind) == "anlit"


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def parameters_of(kind: type) -> list[Any]:
    """The arguments of a constructor, also behind **kwargs.

    Each has `name`, `annotation` and `default`.
    """
    return list(get_signature_parameters(kind, None))


def annotations_of(kind: type) -> dict[str, Any]:
    """The types of a constructor's arguments by name, Any without an annotation."""
    annotations = {}
    for parameter in parameters_of(kind):
        has_annotation = parameter.annotation is not inspect.Parameter.empty
        annotations[parameter.name] = parameter.annotation if has_annotation else Any
    return annotations


def _convert(annotation: Any, value: Any, owner: type, location: str) -> Any:
    """`value` as the type of `annotation`, for an argument of `owner`.

    Raises UserError if it cannot be read so.
    """
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin in (Union, types.UnionType):
        return _convert_to_union(inner, value, owner, location)
    if _is_plain_as(annotation, value):
        return value
    if annotation is float and type(value) is int and abs(value) < LARGEST_NUMBER:
        return float(value)
    if origin in (list, Sequence) and isinstance(value, list):
        return _convert_all([inner[0]] * len(value), value, owner, location)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else list(inner)
        if len(kinds) == len(value):
            return tuple(_convert_all(kinds, value, owner, location))
    if origin in (dict, Mapping) and isinstance(value, dict):
        keys = _convert_all([inner[0]] * len(value), [*value], owner, location)
        items = _convert_all([inner[1]] * len(value), [*value.values()], owner, location)
        return dict(zip(keys, items, strict=True))
    if _may_be_built(annotation, owner) and isinstance(value, str | dict):
        return _build(annotation, value, location)
    name = str(annotation).replace("typing.", "")
    if isinstance(annotation, type):
        name = annotation.__name__
    raise UserError(
        f"{location} is {shown(value)}, which cannot be read as {name}: give another value"
    )


def _is_plain_as(annotation: Any, value: Any) -> bool:
    """Whether `value` is of the type already, and describes no object."""
    if annotation is Any:
        return is_plain(value)
    if annotation in (list, dict):
        return isinstance(value, annotation) and is_plain(value)
    if get_origin(annotation) is Literal:
        same = (choice for choice in get_args(annotation) if choice == value)
        return any(type(choice) is type(value) for choice in same)
    if annotation is None:
        return value is None
    return annotation in SCALARS and type(value) is annotation


def _convert_to_union(kinds: Sequence[Any], value: Any, owner: type, location: str) -> Any:
    """`value` as the first type that takes it; None is tried first."""
    ordered = sorted(kinds, key=lambda kind: kind is not type(None))
    for kind in ordered[:-1]:
        try:
            return _convert(kind, value, owner, location)
        except UserError:
            continue
    return _convert(ordered[-1], value, owner, location)


def _convert_all(
    kinds: Sequence[Any], values: Sequence[Any], owner: type, location: str
) -> list[Any]:
    converted = []
    for number, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        converted.append(_convert(kind, value, owner, f"{location}.{number}"))
    return converted


def _build(base: type, value: str | dict[str, Any], location: str) -> Any:
    """A module of the network or a dataclass.

    `value` is a name, {class_path, init_args}, or the arguments alone.
    """
    spec: dict[str, Any] = {"class_path": value} if isinstance(value, str) else value
    if "class_path" not in spec:
        return build_from_plain(base, spec, location)
    path = spec["class_path"]
    arguments = spec.get("init_args", {})
    has_further_keys = spec.keys() - {"class_path", "init_args"}
    if not isinstance(path, str) or not isinstance(arguments, dict) or has_further_keys:
        raise UserError(
            f"{location} is {shown(value)}: give class_path and init_args, and nothing else"
        )
    return build_from_plain(subclass_named(base, path, location), arguments, location)


def _may_be_built(annotation: Any, owner: type) -> bool:
    """Whether objects of a type may be made for an argument of `owner`.

    They may for a described class or a dataclass, of anlit or of the owner's package.
    """
    if not isinstance(annotation, type):
        return False
    if not issubclass(annotation, DESCRIBED) and not is_dataclass(annotation):
        return False
    return _package_of(annotation) in ("anlit", _package_of(owner))


def is_plain(value: Any) -> bool:
    """Whether it has numbers and texts only, and describes no object."""
    if isinstance(value, dict):
        entries = (*value, *value.values())
        return "class_path" not in value and all(is_plain(entry) for entry in entries)
    if isinstance(value, list):
        return all(is_plain(entry) for entry in value)
    return isinstance(value, SCALARS)

"""Checks of values against the schema: ranges of numbers, nulls, and the precision.

The command line calls them before anything is made, constructors call them in Python. Without
torch.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from anlit.config.schema import row_of
from anlit.errors import UserError

Precision = Literal["32-true", "bf16-mixed", "bf16-true", "64-true"]
LONG_NAMES = {
    "None": "32-true",
    "32": "32-true",
    "64": "64-true",
    "16": "16-mixed",
    "bf16": "bf16-mixed",
}
"""Lightning's short names of precisions → its long names."""
TYPES_IN_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
}
"""Name of a type → its values in words."""


def check_ranges(key: str, value: Any) -> None:
    """Raise UserError for the first number in `value`, the setting `key`, that is out of its range.

    `value` may be a number, a list, a mapping, a dataclass, or the `locals()` of a constructor. In
    the last two, None is refused too where the annotation does not allow it.
    """
    if isinstance(value, int | float):
        _check_number(key, value)
        return
    _refuse_nulls(key, value)
    for name, entry in _entries(value):
        check_ranges(f"{key}.{name}", entry)


def _check_number(key: str, number: float) -> None:
    setting = row_of(key)
    if isinstance(number, bool) or setting is None or setting.range is None:
        return
    if number not in setting.range:
        advice = setting.range.text
        if not math.isfinite(number):
            advice = f"a finite number, {advice}"
        raise UserError(f"{key}={number} is out of range: give {advice}")


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    """Names and values in a dataclass, a mapping or a list; none in other objects."""
    if is_dataclass(value):
        return vars(value).items()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return ()


def _refuse_nulls(key: str, value: Any) -> None:
    """Raise UserError for a None that a dataclass or a constructor does not allow."""
    if is_dataclass(value):
        for field in fields(value):
            if getattr(value, field.name) is None:
                refuse_null(f"{key}.{field.name}", field.type, _default_of(field))
        return
    constructed = value.get("__class__") if isinstance(value, Mapping) else None
    if inspect.isclass(constructed):
        for parameter in inspect.signature(constructed.__init__).parameters.values():
            if value.get(parameter.name, "") is None:
                refuse_null(f"{key}.{parameter.name}", parameter.annotation, parameter.default)


def _default_of(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def check_precision(setting: Any) -> Any:
    """The long name of a Trainer's precision. Raises UserError if anlit does not train in it."""
    precision = LONG_NAMES.get(str(setting), str(setting))
    if precision in ("16-mixed", "16-true"):
        cause = "is float16, in which the loss's gradients under 6e-8 become 0"
        raise UserError(f"trainer.precision={precision} {cause}: set bf16-mixed or 32-true")
    if precision not in get_args(Precision):
        raise UserError(unknown_precision(precision))
    return precision


def unknown_precision(name: str) -> str:
    """The sentence about a precision in which anlit does not train."""
    fix = f"set {', '.join(get_args(Precision))}; float8 is model.init_args.runtime.float8"
    return f"trainer.precision={name} is not one of anlit's: {fix}"


def refuse_null(key: str, annotation: Any, default: Any, values: str = "") -> None:
    """Raise UserError, which names the default, if a setting of this type takes no null.

    `values` says what to give; by default it follows from the annotation.
    """
    if default is None or _takes_null(annotation):
        return
    fix = f"give {values or _in_words(annotation)}"
    if default is not inspect.Parameter.empty:
        fix += f"; the default is {_shown_default(default)}"
    raise UserError(f"{key} is empty: {fix}")


def _takes_null(annotation: Any) -> bool:
    if annotation in (inspect.Parameter.empty, Any, object, None, NoneType):
        return True
    if isinstance(annotation, str):  # an annotation that is not evaluated
        return "None" in annotation or "Optional" in annotation
    if get_origin(annotation) in (Union, UnionType):
        return any(_takes_null(member) for member in get_args(annotation))
    return get_origin(annotation) is Literal and None in get_args(annotation)


def _in_words(annotation: Any) -> str:
    """The values of a type: `true or false or one of auto`."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    kind = get_origin(annotation) or annotation
    return TYPES_IN_WORDS.get(getattr(kind, "__name__", ""), "its settings")


def _shown_default(default: Any) -> str:
    """A default as YAML has it; for an object the name of its class."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Mapping):
        return str(default.get("class_path", "empty")).rsplit(".", 1)[-1]
    if isinstance(default, tuple):
        return str(list(default))
    if isinstance(default, int | float | str | list):
        return str(default)
    kind = default if isinstance(default, type) else type(default)
    return kind.__name__.removeprefix("LazyInstance_")

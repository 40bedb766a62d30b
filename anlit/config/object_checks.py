"""Checks that a setting is an object of its class, because Python does not read annotations."""

import inspect
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin

from anlit.config.objects import DESCRIBED, annotations_of, shown
from anlit.errors import UserError


def check_objects_of(key: str, config: Any) -> None:
    """Raise UserError for the first field of a dataclass that is not an object of its class.

    `key` is the dataclass's setting, such as `model`.
    """
    for field in fields(config):
        check_object(f"{key}.{field.name}", getattr(config, field.name), field.type)


def check_object(key: str, value: Any, annotation: Any) -> None:
    """Raise UserError if the setting `key`, or an argument of it, is not an object of its class.

    Settings of another kind than an object are not checked.
    """
    if get_origin(annotation) in (list, Sequence) and isinstance(value, list | tuple):
        (entry_annotation,) = get_args(annotation)
        for number, entry in enumerate(value):
            check_object(f"{key}.{number}", entry, entry_annotation)
    if not _is_class_of_objects(annotation):
        return
    if not isinstance(value, annotation):
        raise UserError(_describe_wrong_object(key, value, annotation))
    for name, inner_annotation in annotations_of(type(value)).items():
        if hasattr(value, name):
            check_object(f"{key}.{name}", getattr(value, name), inner_annotation)


def _is_class_of_objects(annotation: Any) -> bool:
    if not inspect.isclass(annotation):
        return False
    return issubclass(annotation, DESCRIBED) or is_dataclass(annotation)


def _describe_wrong_object(key: str, value: Any, expected: type) -> str:
    if inspect.isclass(value) and issubclass(value, expected):
        return f"{key} is the class {value.__name__}: give an object, {value.__name__}()"
    if isinstance(value, str) and value.isidentifier():
        return f"{key} is the text {shown(value)}: give an object, {value}()"
    return f"{key} is {shown(value)}: give an object of {expected.__name__} or of a subclass"

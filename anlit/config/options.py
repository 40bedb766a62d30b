"""The options of the tools: argparse with errors of one sentence, and the types of numbers."""

import argparse
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from anlit.config.error_messages import explain_parser_error
from anlit.errors import UserError
from anlit.io.yaml_text import parse_scalar

NAMES_OF_FILES = ("CHECKPOINT", "DIR", "FILE", "FOLDER", "PATH", "RUN")
"""How --help calls a file or a folder."""


class ToolParser(argparse.ArgumentParser):
    """argparse without abbreviations, and with a UserError for every mistake.

    `prog` is the whole command: `anlit score`. In the name of a file or a folder ~ is the home
    folder. Shells leave it in `--output=~/report`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        options, unknown = super().parse_known_args(*args, **kwargs)
        for action in self._actions:
            value = getattr(options, action.dest, None)
            if action.metavar in NAMES_OF_FILES and value is not None:
                setattr(options, action.dest, expand_home(value))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Raise UserError, which names option, value and fix."""
        raise UserError(explain_parser_error(message, self.options, self.prog))

    @property
    def options(self) -> Collection[str]:
        """All spellings of all options: `--output`, `-h`."""
        return self._option_string_actions


def expand_home(value: Any) -> Any:
    """Return `value` with the home folder for ~ at the start of each text, at any depth."""
    if isinstance(value, dict):
        return {key: expand_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    if isinstance(value, Path):
        return value.expanduser()
    return os.path.expanduser(value) if isinstance(value, str) else value


def at_least(least: float, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The type of an option that takes numbers from `least` on, and neither NaN nor infinity."""
    bound = f"at least {least}" if kind is int else f"at least {least} and finite"

    def number(text: str) -> float:
        value = whole_number(text) if kind is int else kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be {bound}")
        return value

    number.__name__ = kind.__name__  # argparse names it in its error
    return number


def whole_number(text: str) -> int:
    """The type of an option that takes an integer, also written 1e4 or 1_000.

    Raises ValueError for other texts.
    """
    value = parse_scalar(text)
    if type(value) is not int:
        raise ValueError(f"{text} is not an integer")
    return value


whole_number.__name__ = "int"  # argparse names it in its error


def numbers(text: str) -> tuple[int, ...]:
    """The type of an option that takes numbers from 1 on: `256,1024` → (256, 1024)."""
    count = at_least(1)
    return tuple(count(word) for word in text.split(","))  # type: ignore[misc]

"""The parser of a tool's options: one spelling of each, and a mistake in one sentence."""

import argparse
import difflib
import re
from typing import Any, NoReturn

from anlit.errors import UserError

_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)(.*)")
_MISSING = re.compile(r"the following arguments are required: (.*)")
_ARGUMENT = re.compile(r"argument ([^:]+): (.*)")
_VALUE = re.compile(r"invalid (\w+) value: '(.*)'")
_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)")
_KINDS = {"int": "an integer", "float": "a number", "numbers": "integers such as 1,2"}


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are a UserError that names option, value and fix.

    Args:
        settings: Of `argparse.ArgumentParser`; `prog` is the whole command, such as `anlit score`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises:
        UserError: Always.
        """
        raise UserError(self._sentence(message))

    def _sentence(self, message: str) -> str:
        see = f"{self.prog} --help lists the options"
        if found := _UNKNOWN.match(message):
            if not found[1].startswith("-"):
                return f"{self.prog} does not know what to do with {found[1]}: {see}"
            name = found[1].split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
            return f"{name} is not an option of {self.prog}: {f'did you mean {close[0]}?' if close else see}"
        if found := _MISSING.match(message):
            return f"{self.prog} needs {found[1].replace(', ', ' and ')}: {see}"
        if not (found := _ARGUMENT.match(message)):
            return f"{message}: {see}"
        option, problem = found[1], found[2]
        if value := _VALUE.match(problem):
            return f"{option} {value[2]} is of the wrong type: give {_KINDS.get(value[1], f'a {value[1]}')}"
        if choice := _CHOICE.match(problem):
            known = choice[2].replace("'", "")
            return f"{option} {choice[1]} is not known: choose one of {known}"
        return f"{option} {problem}: {see}"

"""Errors of the argument parser in one sentence that names the key, the value and the fix.

For a wrong value inside a class, jsonargparse reports a nested list with the error of every member of a union, and the
whole configuration. The keys that lead to the wrong value are in its "Parser key" lines, which this file reads.
"""

import difflib
import importlib
import re
from collections.abc import Iterable

from torch.optim import Optimizer

from anlit.attention import mechanisms
from anlit.discovery import classes_of
from anlit.layers.positions import Positions
from anlit.settings import parameters_of

_KEY = re.compile(r'Parser key "([^"]+)":')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_UNKNOWN_OPTION = re.compile(r"Option '([^']+)' is not accepted|Key '([^']+)' is not expected")
_WRONG_TYPE = re.compile(r"Expected an? (?:<class '([^']+)'>|(.+?))\. Got value: (.*?)(?:\. Got value: |\n|$)")
_WRONG_CLASS = re.compile(r"Expected a dot import path string: (.*)")
_REQUIRED = re.compile(r"the following arguments are required: (.*)")
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_SUBCOMMAND_OPTION = re.compile(r"does not accept option '([^']+)'")
_GIVEN_CLASS = re.compile(r"Got value: Namespace\(class_path='([^']+)'")
_DENIED = re.compile(r"Importing '([^']+)' is not allowed")
_NO_SUBCLASS = re.compile(r"Import path (\S+) does not correspond to a subclass of (\w+)")
_MISSING_FILE = re.compile(r"File does not exist: '?([^'\n]+)'?")


def listed(names: Iterable[str]) -> str:
    """`A, B or C`."""
    *others, last = names
    return f"{', '.join(others)} or {last}"


CLASSES = {
    "model": "GPT, NGPT or AnGPT",
    "data": listed([*classes_of("anlit.data.corpora"), "Mixture", "TokenShards", "NeedleInHaystack"]),
    "positions": listed(classes_of("anlit.layers.positions", Positions)),
    "attention": listed(mechanisms.__all__),
    "optimizer": listed(
        [
            *(f"anlit.{name}" for name in classes_of("anlit.optim.optimizers", Optimizer)),
            "the path of a torch optimizer such as torch.optim.SGD",
        ]
    ),
}
"""The classes that each key offers, found by the file that they lie in."""


def one_sentence(message: str, known_keys: list[str]) -> str:
    """The cause in a message of the parser; `known_keys` are all dotted options, for "did you mean"."""
    message = message.strip()
    if match := _UNRECOGNIZED.search(message) or _SUBCOMMAND_OPTION.search(message):
        name = match[1].split()[0].lstrip("-").split("=")[0]
        return f"{name} is not a setting: {_choose(name, known_keys)}"
    if match := _MISSING_FILE.search(message):
        return f"the file {match[1]} does not exist: check the path given to --{_key_path(message) or 'config'}"
    if match := _REQUIRED.search(message):
        missing = [name.rsplit(".", 1)[-1] for name in match[1].split(", ")]
        needs = " and ".join(f"--{name} ({CLASSES[name]})" if name in CLASSES else f"--{name}" for name in missing)
        return f"{needs} must be given, in a --config FILE or as an option"
    key = _key_path(message)
    if match := _DENIED.search(message) or _NO_SUBCLASS.search(message):
        return f"{key} names {match[1]}, which is not a class for it: {_classes(key.rsplit('.', 1)[-1])}"
    classes = _CLASS.findall(message) + _GIVEN_CLASS.findall(message)
    if match := _UNKNOWN_OPTION.search(message):
        name = match[1] or match[2]
        options = _options(classes[-1]) if classes else [k for k in known_keys if "." not in k]
        where = f"{key}.{name}" if key else name
        owner = f" of {classes[-1]}" if classes else ""
        return f"{where} is not a setting{owner}: {_choose(name, options)}"
    if match := _WRONG_TYPE.search(message):
        kind, value = (match[1] or match[2]), match[3].strip()
        return f"{key}={value} is of the wrong type: give {_kind(kind)}"
    if match := _WRONG_CLASS.search(message):
        return f"{key}={match[1]} names no class: {_classes(key.rsplit('.', 1)[-1])}"
    return _flat(message)


def _key_path(message: str) -> str:
    """The keys of the nested "Parser key" lines, joined by dots: model + attention + tau."""
    keys: list[str] = []
    for key in _KEY.findall(message):
        if not keys or key != keys[-1]:
            keys.append(key)
    return ".".join(keys)


def _options(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    return [one.name for one in parameters_of(kind) if one.name != "params"]


def _choose(name: str, options: list[str]) -> str:
    if not options:
        return "the class has none, so leave it out, or choose a class that has it"
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    close = close or difflib.get_close_matches(name.split(".")[0], options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(options)}" if len(options) < 40 else "see anlit fit --help"


def _classes(role: str) -> str:
    known = CLASSES.get(role)
    return f"choose {known}" if known else "give the dotted path of a class that can be imported"


def _kind(name: str) -> str:
    if name.startswith("typing.Literal["):
        return f"one of {name.removeprefix('typing.Literal[').removesuffix(']')}"
    name = name.removeprefix("<class '").removesuffix("'>")
    return {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}.get(name, f"a {name}")


def _flat(message: str) -> str:
    """Any other message of the parser, without its dump of the whole configuration."""
    body, _, value_part = message.partition("Given value type")
    lines = [line.strip(" -") for line in body.splitlines()]
    skip = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>", "Parser key")
    messages = [line for line in lines if line and not line.startswith(skip)]
    expected = [line.removeprefix("Expected a ") for line in messages if line.startswith("Expected a ")]
    if value_part and expected and len(expected) == len(messages):
        value = value_part.rsplit("Given value: ", 1)[-1].strip()
        return f"{_key_path(message)}={value} has the wrong type: give {' or '.join(map(_kind, expected))}"[:480]
    return " ".join(messages)[:480]

"""Makes one sentence of an error of a parser: key, value and fix. Without torch.

argparse reads the options of the tools, jsonargparse the options of `anlit fit`. If a value inside
a class is wrong, jsonargparse reports a nested list. It has an error per union member, and the
whole configuration. Its "Parser key" lines have the keys that lead to the value. `EXPLANATIONS` has
a pattern and a function for each kind of error.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from anlit.config import foreign_names
from anlit.config.imports import DOTTED_PATH, import_failure, is_broken, path_problem
from anlit.config.registry import public_classes
from anlit.config.schema import SETTINGS
from anlit.config.trackers import explain_missing_package
from anlit.config.value_checks import TYPES_IN_WORDS, unknown_precision
from anlit.io.yaml_text import COUNT_SUFFIXES

LONGEST_MESSAGE = 400
"""Characters of a message that no pattern explains."""
FEW_OPTIONS = 40
"""Fewer options than this are listed."""
NOT_FOR_USERS = ("Schedule", "WarmedUp", "Annealed")
"""Schedules that no configuration names: base classes, and the schedule of `--anneal`."""

_KEY = re.compile(r'Parser key "([^"]+)":')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_OWNER_IN_VALUE = re.compile(r"Got value: Namespace\(class_path='([^']+)'")
_WRAPPED = re.compile(r"Problem with given class_path '(?:[^']*\.)?(?P<name>\w+)': (?P<cause>.*)")
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value: |\n|$)")
_NAMED_PATH = re.compile(r"(?:value: |val='|path but |class_path[ =]')([\w.]+)")
"""A path in an error of jsonargparse that the user may have written."""
_MEMBERS = re.compile(r"Errors:\n(?P<errors>(?P<indent> *)- [\s\S]*?)\nGiven value")
"""The errors of a union's members. Each begins with the same indentation and a dash."""
_OF_PARSER = re.compile(r"Not a valid subclass of|Expected an? (?:<class|typing\.)")
"""How an error begins that says only that a value is of another type."""
_FURTHER_MEMBERS = re.compile(r"(\n *- Problem with given class_path)([\s\S]*?)\1[\s\S]*")
"""Errors of a union's members after the first with a class. Only the first has the user's class."""
_HEADER = re.compile(r"(?:Parser key \"[^\"]+\"|Problem with given class_path '[^']+'):")
_END_OF_CAUSES = re.compile(r"\n\s*(?:- Expected an? <class|Given value|Got value)")
_LENGTH = re.compile(r"Expected a tuple with (\d+) elements")
_TYPE = re.compile(
    r"Expected an? (?:<class '(?P<kind>[\w.]+)'>|typing\.Literal\[(?P<values>.*?)\])"
)
_ARGUMENT = r"unrecognized arguments: (?P<name>[^\s=]+)"


@dataclass(frozen=True)
class ParserError:
    """An error of a parser.

    Args:
        message: The parser's words.
        options: All options of the command.
        program: The whole command, `anlit fit`.
    """

    message: str
    options: Collection[str]
    program: str

    @property
    def keys(self) -> list[str]:
        """The keys that lead to the value: model, attention, tau."""
        return _nested_keys(self.message)

    @property
    def key(self) -> str:
        return ".".join(self.keys)

    @property
    def value(self) -> str:
        """The wrong value as the parser shows it; "" if it does not."""
        return next(iter(_VALUE.findall(self.message)), "")

    @property
    def help(self) -> str:
        return f"{self.program} --help lists the options"


def explain_parser_error(message: str, options: Collection[str], program: str) -> str:
    """One sentence for an error of a parser, with the arguments of `ParserError`."""
    shortened = _FURTHER_MEMBERS.sub(r"\1\2", message.strip())
    error = ParserError(shortened, options, program)
    is_denied = "is not allowed" in shortened  # by the parser, which has not imported it
    for path in () if is_denied else dict.fromkeys(_NAMED_PATH.findall(shortened)):
        if DOTTED_PATH.fullmatch(path) and is_broken(path):
            return f"{error.key} names {path}, and {import_failure(path)}: correct the module"
    for patterns, explain in EXPLANATIONS:
        match = _first_match(patterns, shortened)
        if match:
            return explain(error, match)
    return f"{' '.join(shortened.split())[:LONGEST_MESSAGE]}: {error.help}"


def _first_match(patterns: Sequence[str], message: str) -> re.Match[str] | None:
    """The match that begins first, and belongs to the first pattern of several."""
    matches = filter(None, (re.search(pattern, message) for pattern in patterns))
    return min(matches, key=lambda match: match.start(), default=None)


def _nested_keys(message: str) -> list[str]:
    """The keys of the "Parser key" lines, without repetitions."""
    keys: list[str] = []
    for key in _KEY.findall(message):
        if keys[-1:] != [key]:
            keys.append(key)
    return keys


def _explain_unknown(error: ParserError, match: re.Match[str]) -> str:
    """An option that the command does not have, or a setting that a class does not have."""
    name = match["name"]
    keys = _nested_keys(error.message[: match.start()])
    owner = _owner_of_unknown(error.message, match)
    if owner:
        return _explain_unknown_setting(error, keys, name.lstrip("-"), owner)
    if match.re.pattern == _ARGUMENT and not name.startswith("-"):
        return f"{error.program} does not know what to do with {name}: {error.help}"
    kind = "an option" if name.startswith("-") else "a setting"
    group = match.groupdict().get("group")
    name = f"{group}.{name}" if group else name
    subcommand = f"{error.program.split()[-1]}."
    key = _key_meant_by(name.lstrip("-")) if "--model" in error.options else ""
    if name.startswith(subcommand):  # a file with LightningCLI's section `fit:`
        fix = f"did you mean {name.removeprefix(subcommand)}?"
    elif key:
        fix = f"did you mean --{key}?"
    else:
        fix = _nearest(name, error.options) or error.help
    return f"{'.'.join([*keys, name])} is not {kind} of {error.program}: {fix}"


def _key_meant_by(name: str) -> str:
    """`trainer.max_steps` for `steps`, `model.optimizer.betas` for `optimizer.betas`; or ""."""
    first_part, _, rest = name.partition(".")
    last_part = rest.rpartition(".")[2] or name
    if last_part in foreign_names.KEYS:
        return foreign_names.KEYS[last_part]
    key = _key_that_ends_in(name) or _key_that_ends_in(last_part)
    section = _key_that_ends_in(first_part)
    if not key and rest and section:
        return f"{section}.{rest}"
    return key


def _key_that_ends_in(name: str, section: str = "") -> str:
    """`trainer.max_steps` for `max_steps`, `model.optimizer.lr` for `lr` and for `optimizer.lr`.

    "" if there is none. `section` is the beginning of the key.
    """
    for setting in SETTINGS:
        key = setting.key.removesuffix(".*")
        if key.startswith(section) and key.endswith(f".{name}"):
            return key
    return ""


def _owner_of_unknown(message: str, match: re.Match[str]) -> str:
    """The path of the class that was given an unknown setting; "" outside of classes."""
    start = message.find("Got value", match.end())
    in_value = _OWNER_IN_VALUE.match(message, start) if start >= 0 else None
    if in_value:
        return in_value[1]
    owners = _OWNER.findall(message[: match.start()])
    return owners[-1] if owners else ""


def _explain_unknown_setting(error: ParserError, keys: list[str], name: str, owner: str) -> str:
    """A setting that the class `owner` does not have."""
    from anlit.config.objects import parameters_of  # torch

    kind = _class_at(owner)
    missing = explain_missing_package(kind.__name__)
    if missing:  # a logger has more settings where its package is installed
        return missing
    if kind.__name__ == "LanguageModel":  # the class of all models: none was chosen
        missing = "the following arguments are required: --model"
        return explain_parser_error(missing, error.options, error.program)
    key = _key_that_ends_in(name, ".".join([*keys, ""]))
    if key.count(".") > len(keys):  # in a class of one of its settings
        fix = f"did you mean {key}?"
    elif keys[:1] in (["model"], ["data"]) and name in foreign_names.KEYS:
        fix = f"did you mean {foreign_names.KEYS[name]}?"
    else:
        names = [parameter.name for parameter in parameters_of(kind)]
        fix = _nearest(name, [name for name in names if name != "params"])
    fix = fix or "the class has none, so leave it out, or choose a class that has it"
    return f"{'.'.join([*keys, name])} is not a setting of {owner}: {fix}"


def _nearest(name: str, options: Collection[str]) -> str:
    """The advice to take the option nearest to `name`, or any of a few. "" if none is near."""
    plain_name = name.lstrip("-")
    plain_options = [option.lstrip("-") for option in options]
    section = plain_name[: plain_name.rfind(".") + 1]
    within = [option for option in plain_options if option.startswith(section)]
    settings = [option.removeprefix(section) for option in within]
    if section and settings:
        for setting in difflib.get_close_matches(plain_name.removeprefix(section), settings, n=1):
            return f"did you mean {name.removesuffix(plain_name)}{section}{setting}?"
        return ""
    for spelling in (plain_name, plain_name.split(".")[0]):
        for option in difflib.get_close_matches(spelling, plain_options, n=1):
            return f"did you mean {name.removesuffix(plain_name)}{option}?"
    if options and plain_name == name and len(options) < FEW_OPTIONS:
        return f"choose one of {', '.join(options)}"
    return ""


def _explain_no_mapping(error: ParserError, match: re.Match[str]) -> str:
    fix = "give a mapping, or a file that has one"
    return f"{error.key}={match['value']} is of the wrong type: {fix}"


def _explain_missing(error: ParserError, match: re.Match[str]) -> str:
    """Options that the command needs."""
    subcommand = error.program.split()[-1]
    names = []
    for name in match["names"].split(", "):
        option = f"--{'.'.join([*error.keys, name])}" if error.keys else name
        option = option.replace(f"{subcommand}.", "--", 1)
        choices = class_choices(option.lstrip("-"))
        names.append(f"{option} ({choices})" if choices else option)
    if subcommand in ("validate", "test") and not error.keys:
        fix = f"give a run folder, as in anlit {subcommand} runs/gpt, or a --config FILE"
    elif "--config" in error.options:
        fix = "give it in a --config FILE or as an option"
    else:
        fix = error.help
    return f"{error.program} needs {' and '.join(names)}: {fix}"


def _explain_option(error: ParserError, match: re.Match[str]) -> str:
    """Any other mistake in an option, in argparse's words."""
    fault = error.message.removeprefix("argument ").replace(": ", " ", 1)
    return f"{fault}: {error.help}"


def _explain_tuple(error: ParserError, match: re.Match[str]) -> str:
    length = _LENGTH.search(error.message)
    size = f" of {length[1]} values" if length else ""
    return f"{error.key}={error.value} is of the wrong type: give a list{size} such as [0.9, 0.95]"


def _explain_no_class(error: ParserError, match: re.Match[str]) -> str:
    return explain_no_class(error.key, match.groupdict().get("value") or error.value)


def _explain_type(error: ParserError, match: re.Match[str]) -> str:
    """A value of the wrong type; a union has several right types."""
    value = error.value
    if error.key == "trainer.precision" and value != "None":
        return unknown_precision(value)
    kinds = _expected_types(error.message)
    fix = " or ".join(dict.fromkeys(map(_type_in_words, kinds)))
    if value == "None":
        return f"{error.key} has an empty value: give {fix}"
    if re.fullmatch(r"[\d.]+[A-Za-z]", value) and {"int", "float"}.intersection(kinds):
        fix += f"; a count may end in {', '.join(COUNT_SUFFIXES)}"
    if value[:1] in ("[", "{") and "str" in kinds:  # the parser took the text for YAML
        fix += ", one in brackets with quotes in a --config FILE"
    elif kinds == ["str"]:
        value = value.lower() if value in ("True", "False") else value
        fix += f', with quotes: "{value}"'
    return f"{error.key}={value} is of the wrong type: give {fix}"


def _expected_types(message: str) -> list[str]:
    """Names of types, or `one of 1, 2`, without None."""
    kinds = []
    for match in _TYPE.finditer(message):
        if match["kind"] != "NoneType":
            kinds.append(match["kind"] or f"one of {match['values']}")
    return kinds


def _explain_cause(error: ParserError, match: re.Match[str]) -> str:
    """Any other mistake below a key, in the words of its innermost cause."""
    *_, details = _HEADER.split(error.message)
    causes = _END_OF_CAUSES.split(details)[0].strip().splitlines()
    cause = causes[-1].lstrip(" -").rstrip(".") if causes else "the value is wrong"
    return f"{error.key}: {cause}: {error.help}"


EXPLANATIONS: tuple[tuple[Sequence[str], Callable[[ParserError, re.Match[str]], str]], ...] = (
    (
        (
            _ARGUMENT,
            r"(?:Group '(?P<group>[^']+)' )?does not accept option '(?P<name>[^']+)'",
            r"Option '(?P<name>[^']+)' is not ",
            r"Key '(?P<name>[^']+)' is not ",
        ),
        _explain_unknown,
    ),
    ((r"Unable to load config '(?P<value>.*?)'",), _explain_no_mapping),
    ((r"the following arguments are required: (?P<names>.*)",), _explain_missing),
    ((r"^argument [^:]+: ",), _explain_option),
    ((_LENGTH.pattern, "Expected a <class 'tuple'>"), _explain_tuple),
    (
        (
            r"(?:dot import path string|import path format): (?P<value>.*)",
            r"Importing '(?P<value>[^']+)' is not allowed",
            r"Import path (?P<value>\S+) does not",
            r"class_path '(?P<value>[^']+)':\s+(?:module|No module)",
            r"Not a valid subclass of",
            r"Import path does not correspond",
            r"(?:module|No module).*\. Got value: (?P<value>\S+)",
            r"is not iterable",
        ),
        _explain_no_class,
    ),
    (
        (
            r"Expected an? <class '(?!NoneType')[\w.]+'>",
            r"Expected an? typing\.Literal\[.*?\]",
        ),
        _explain_type,
    ),
    ((_HEADER.pattern,), _explain_cause),
)
"""Patterns of a kind of error, and the function that explains it. The first kind in the message
counts."""


def explain_no_class(key: str, value: Any) -> str:
    """The sentence about a value of `key` that names no class of the right type."""
    fix = "give the dotted path of a class that can be imported"
    for name in key.split(".")[-2:]:
        choices = class_choices(name)
        if choices:
            fix = f"choose {choices}"
    if value == "None":
        return f"{key} has an empty value: {fix}"
    problem = path_problem(str(value))
    reason = f", since {problem}" if problem else ""
    return f"{key} names {value}, which is not a class for it{reason}: {fix}"


def class_choices(name: str) -> str:
    """The classes that a key such as `attention` offers, `A, B or C`; "" for other keys."""
    match name:
        case "model":
            names = [*public_classes("anlit.training.models")]
        case "attention":
            names = [*public_classes("anlit.nn.mechanisms")]
        case "positions":
            classes = public_classes("anlit.nn.layers.positions")
            names = [kind for kind in classes if kind != "Positions"]
        case "schedule":
            classes = public_classes("anlit.training.optim.schedule")
            names = [kind for kind in classes if kind not in NOT_FOR_USERS]
        case "optimizer":  # torch has an AdamW too
            classes = public_classes("anlit.training.optim.optimizers")
            names = [f"anlit.{kind}" for kind in classes]
            names.append("the path of a torch optimizer such as torch.optim.SGD")
        case "data":
            corpora = public_classes("anlit.data.corpora")
            names = [*corpora, "Mixture", "TokenShards", "NeedleInHaystack"]
            names.append("the path of a LightningDataModule of yours such as mydata.MyData")
        case "logger":
            names = ["CSVLogger", "TensorBoardLogger", "--config logger/wandb.yaml"]
        case _:
            return ""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def explain_constructor_error(error: Exception) -> str:
    """The sentence of a class's constructor.

    The parser lists an error for each member of a union. For a list, the error of a member that is
    a single class comes first and says only that it is a list.
    """
    members = _MEMBERS.search(str(error))
    if members:
        return _constructor_error(members)
    message = " ".join(str(error).split())
    wrapped = _WRAPPED.fullmatch(message)
    return f"{wrapped['name']}: {wrapped['cause']}" if wrapped else message


def is_of_parser(message: str) -> bool:
    """Whether an error says only that a value is of another type, not what a class refuses."""
    return _OF_PARSER.match(message) is not None


def _constructor_error(members: re.Match[str]) -> str:
    """The first error of a union's members that is a constructor's, with the class if it is one."""
    _, *errors = f"\n{members['errors']}".split(f"\n{members['indent']}- ")
    of_constructor = [error for error in errors if not is_of_parser(error)]
    message = " ".join((of_constructor or errors)[0].split())
    given_value = members.string[members.end() :]
    classes = re.findall(r"class_path='(?:[^']*\.)?(\w+)'", given_value)
    return f"{classes[0]}: {message}" if len(classes) == 1 else message


def _class_at(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _type_in_words(name: str) -> str:
    if name.startswith("one of "):
        return name
    return TYPES_IN_WORDS.get(name, f"a {name}")

"""Every mistake on the command line in one sentence that names the key, the value and the fix; without torch.

argparse reads the options of the tools, and jsonargparse those of `anlit fit`. Of a wrong value inside a class,
jsonargparse reports the error of every member of a union, and the whole configuration, as a nested list. The keys that
lead to the value are in its "Parser key" lines.
"""

import difflib
import importlib
import re
from collections.abc import Collection, Iterable
from dataclasses import is_dataclass
from pydoc import locate
from typing import Any

from anlit.config.registry import public_classes
from anlit.config.value_checks import TYPES_IN_WORDS

_KEY = re.compile(r'Parser key "([^"]+)":')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_OWNER_AFTER = re.compile(r"Got value: Namespace\(class_path='([^']+)'")
_VALUE = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value: |\n|$)")
_UNKNOWN = re.compile(
    r"unrecognized arguments: ([^\s=]+)|does not accept option '([^']+)'|(?:Option '([^']+)' is|Key '([^']+)' is) not "
)
_NO_MAPPING = re.compile(r"Unable to load config '(.*?)'")
_MISSING = re.compile(r"the following arguments are required: (.*)")
_OPTION = re.compile(
    r"argument ([^:]+): (?:invalid (\w+) value: '(.*)'|invalid choice: '?(.*?)'? \(choose from (.*)\))?"
)
_NO_CLASS = re.compile(
    r"(?:dot import path string|import path format): (.*)|Importing '([^']+)' is not allowed|Import path (\S+) does not"
    r"|class_path '([^']+)':\s+(?:module|No module)|Not a valid subclass of|Import path does not correspond"
    r"|(?:module|No module).*\. Got value: (\S+)|is not iterable"
)
_SEVERAL = re.compile(r"Multiple subclasses with name (\w+)\. .* ambiguity: (.*)\.")
_OTHERS = re.compile(r"(\n *- Problem with given class_path)([\s\S]*?)\1[\s\S]*")
_MONITOR = re.compile(
    r"metric `(.*?)` which is not available.* following: (.*)|"
    r"monitor='(.*?)'\)` could not find the monitored key in the returned metrics: \[(.*?)\]"
)
_TWICE = re.compile(r"\S+ is written twice[^\n]*")
_LENGTH = re.compile(r"Expected a tuple with (\d+) elements")
_NO_SUBCLASS = re.compile(r"Subclasses are disabled for (\w+), thus")
_CAUSE = re.compile(r"(?:Parser key \"[^\"]+\"|Problem with given class_path '[^']+'):\s*([^\n]+)")
_EXPECTED = re.compile(r"Expected an? (?:<class '([\w.]+)'>|typing\.Literal\[(.*?)\])")
EXAMPLES = {"betas": "[0.9, 0.95]"}
"""A list for a setting that takes one of a fixed length."""
ADVICE = {
    "No supported gpu backend found|CUDAAccelerator": "trainer.accelerator needs a GPU, and none was found: set "
    "--trainer.accelerator cpu --trainer.devices 1, or check with nvidia-smi",
    "CPUAccelerator": "trainer.devices is no number of processes: give --trainer.devices 1 or more on CPU",
    "Timer.duration=": "trainer.max_time is no duration: give DD:HH:MM:SS, such as 00:12:00:00 for twelve hours",
}
"""A pattern in a message of Lightning's → the sentence that the user gets instead."""


def sentence(message: str, options: Collection[str], program: str) -> str:
    """The cause in what a parser said. `options`: all that may be given; `program`: the whole command, `anlit fit`."""
    message, see = message.strip(), f"{program} --help lists the options"
    message = _OTHERS.sub(
        r"\1\2", message
    )  # of a union's members, the first that takes a class has the class given
    if match := _UNKNOWN.search(message):
        return _unknown(message, match, options, program, see)
    key = ".".join(keys := _key(message))
    if match := _NO_MAPPING.search(message):
        return f"{key}={_first(match)} is of the wrong type: give a mapping, or a file that has one"
    if match := _MISSING.search(message):
        names = [f"--{'.'.join([*keys, name])}" if keys else name for name in match[1].split(", ")]
        names = [name.replace(f"{program.split()[-1]}.", "--", 1) for name in names]
        names = [
            f"{name} ({classes})" if (classes := classes_for(name.lstrip("-"))) else name
            for name in names
        ]
        fix = "give it in a --config FILE or as an option" if "--config" in options else see
        return f"{program} needs {' and '.join(names)}: {fix}"
    if match := _OPTION.match(message):
        option, kind, value, choice, choices = match.groups()
        if kind:
            return f"{option} {value} is of the wrong type: give {_kind(kind)}"
        if choice:
            return f"{option} {choice} is not known: choose one of {choices.replace(chr(39), '')}"
        return f"{message.removeprefix('argument ').replace(': ', ' ', 1)}: {see}"
    if match := _TWICE.search(message):
        return f"{key}: {match[0]}: keep one of them"
    if match := _NO_SUBCLASS.search(message):
        return _settings_without_class(message, key, match[1])
    value = next(iter(_VALUE.findall(message)), "")
    if _LENGTH.search(message) or "Expected a <class 'tuple'>" in message:
        size = f" of {match[1]} values" if (match := _LENGTH.search(message)) else ""
        example = f" such as {EXAMPLES[keys[-1]]}" if keys and keys[-1] in EXAMPLES else ""
        return f"{key}={value} is of the wrong type: give a list{size}{example}"
    if match := _SEVERAL.search(message):
        return f"{key}={match[1]} is the name of several classes: choose {match[2].replace(', ', ' or ')}"
    if match := _NO_CLASS.search(message):
        return no_class(key, _first(match) or value)
    if kinds := [
        kind or f"one of {values}"
        for kind, values in _EXPECTED.findall(message)
        if kind != "NoneType"
    ]:
        fix = " or ".join(dict.fromkeys(map(_kind, kinds)))
        if value == "None":
            return f"{key} has an empty value: give {fix}"
        if value[:1] in ("[", "{") and "str" in kinds:  # which the parser took for YAML
            fix += ", one in brackets with quotes in a --config FILE"
        elif kinds == ["str"]:
            value = value.lower() if value in ("True", "False") else value
            fix += f', with quotes: "{value}"'
        return f"{key}={value} is of the wrong type: give {fix}"
    if causes := _CAUSE.findall(message):
        return f"{key}: {causes[-1]}: {see}"
    return f"{' '.join(message.split())[:400]}: {see}"


def _owner(message: str) -> Any:
    """The class that the setting in a message belongs to; None outside of classes."""
    module, _, kind = "".join(_OWNER.findall(message)[-1:]).rpartition(".")
    return getattr(importlib.import_module(module), kind) if module else None


def _settings_without_class(message: str, key: str, kind: str) -> str:
    """The sentence about a class_path for a setting of one class only, such as model.schedule."""
    from anlit.config.objects import parameters_of  # torch

    for parameter in parameters_of(_owner(message)):
        if getattr(parameter.annotation, "__name__", "") == kind:
            names = ", ".join(part.name for part in parameters_of(parameter.annotation))
            fix = f"leave class_path out, and give {names} below {key}.{parameter.name}"
            return f"{key}.{parameter.name} takes no other class than {kind}: {fix}"
    return f"{key} takes no other class than {kind}: leave class_path out"


def _unknown(
    message: str, match: re.Match[str], options: Collection[str], program: str, see: str
) -> str:
    """The sentence about an option, or a setting of a class, that there is not."""
    name, keys = _first(match), _key(message[: match.start()])
    after = _OWNER_AFTER.match(message, message.find("Got value", match.end()))
    owner = after[1] if after else "".join(_OWNER.findall(message[: match.start()])[-1:])
    if not owner and match[1] and not name.startswith("-"):
        return f"{program} does not know what to do with {name}: {see}"
    if owner:
        from anlit.config.objects import parameters_of  # torch

        module, _, kind = owner.rpartition(".")
        if kind == "LanguageModel":  # the class of all models: none was chosen
            return sentence("the following arguments are required: --model", options, program)
        known = parameters_of(getattr(importlib.import_module(module), kind))
        name, options = (
            name.lstrip("-"),
            [parameter.name for parameter in known if parameter.name != "params"],
        )
        see = "the class has none, so leave it out, or choose a class that has it"
    what = f"an option of {program}" if name.startswith("-") else f"a setting of {owner or program}"
    wanted, plain, fix = name.lstrip("-"), [option.lstrip("-") for option in options], see
    if owner and (part := _part_with(known, wanted)):
        return f"{'.'.join([*keys, name])} is not {what}: did you mean {'.'.join([*keys, part])}?"
    close = [
        near
        for part in (wanted, wanted.split(".")[0])
        for near in difflib.get_close_matches(part, plain, n=1)
    ]
    if close:
        fix = f"did you mean {name.removesuffix(wanted)}{close[0]}?"
    elif options and wanted == name and len(options) < 40:
        fix = f"choose one of {', '.join(options)}"
    return f"{'.'.join([*keys, name])} is not {what}: {fix}"


def _part_with(parameters: Iterable[Any], name: str) -> str | None:
    """`optimizer.lr`, if the usual class of one of a class's parameters has this setting."""
    from anlit.config.objects import Configured, made_real, parameters_of  # torch

    for parameter in parameters:
        if isinstance(parameter.default, Configured):
            kind: Any = type(made_real(parameter.default))
        elif isinstance(parameter.default, dict):
            kind = locate(parameter.default.get("class_path", ""))
        else:
            kind = parameter.annotation if is_dataclass(parameter.annotation) else None
        if not isinstance(kind, type):
            continue
        if name in [part.name for part in parameters_of(kind)]:
            return f"{parameter.name}.{name}"
    return None


def no_class(key: str, value: Any) -> str:
    """The sentence about a value of `key` that names no class of the right type."""
    known = next(filter(None, map(classes_for, reversed(key.split(".")[-2:]))), None)
    fix = f"choose {known}" if known else "give the dotted path of a class that can be imported"
    if value == "None":
        return f"{key} has an empty value: {fix}"
    return f"{key} names {value}, which is not a class for it: {fix}"


def classes_for(name: str) -> str:
    """The classes that a key such as `attention` offers, found by the file that they lie in; "" for other keys."""
    rooms = {"data": "data.corpora", "attention": "nn.mechanisms", "positions": "nn.layers.positions",
             "optimizer": "training.optim.optimizers", "schedule": "training.optim.schedule"}  # fmt: skip
    prefix = "anlit." if name == "optimizer" else ""  # torch has an AdamW too
    names = (
        [f"{prefix}{kind}" for kind in public_classes(f"anlit.{rooms[name]}")]
        if name in rooms
        else []
    )
    names += {"model": ["GPT", "NGPT", "AnGPT"], "data": ["Mixture", "TokenShards", "NeedleInHaystack"],
              "logger": ["CSVLogger", "TensorBoardLogger", "--config logger/wandb.yaml"],
              "optimizer": ["the path of a torch optimizer such as torch.optim.SGD"]}.get(name, [])  # fmt: skip
    names = [
        kind for kind in names if kind not in ("Positions", "Schedule", "WarmedUp", "Annealed")
    ]
    return f"{', '.join(names[:-1])} or {names[-1]}" if names else ""


def of_lightning(error: Exception) -> str:
    """The sentence for an error of Lightning's about the Trainer's settings."""
    message = " ".join(str(error).split())
    if match := _MONITOR.search(message):
        name, known = (re.sub("[`']", "", text) for text in match.groups() if text)
        return f"trainer.callbacks.monitor={name} is not logged: choose one of {known}"
    advised = (advice for pattern, advice in ADVICE.items() if re.search(pattern, message))
    return next(advised, f"trainer: {message.split('. ')[0].rstrip('.')}")


def of_constructor(error: Exception) -> str:
    """The sentence of a class's constructor; the parser lists what each member of a union says, the class's first."""
    match = re.search(r"Errors:\n *- (.*)", str(error))
    return match[1] if match else str(error)


def is_of_lightning(error: Exception) -> bool:
    """Whether a run ended because Lightning refuses a setting of the Trainer or of its callbacks."""
    return (
        type(error).__name__ == "MisconfigurationException"
        or _MONITOR.search(str(error)) is not None
    )


def _first(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group), "")


def _key(message: str) -> list[str]:
    """The keys of the nested "Parser key" lines: model, attention, tau."""
    keys = _KEY.findall(message)
    return [key for key, before in zip(keys, ["", *keys], strict=False) if key != before]


def _kind(name: str) -> str:
    if name == "numbers":
        return "integers such as 1,2"
    return TYPES_IN_WORDS.get(name, name if name.startswith("one of ") else f"a {name}")

"""Reads a run's configuration as plain values, and names models and mechanisms for tables."""

import re
from typing import Any

CONFIG = "config.yaml"
"""Name of the configuration file in a run folder."""
ARCHITECTURES = {
    "GPT": "GPT+",
    "NGPT": "nGPT",
    "AnGPT": "anGPT",
}
"""Class of a model → its name in tables."""
KNOWN_PACKAGES = ("anlit", "torch", "lightning")
"""Packages whose classes need no `--import`."""
SPELLED_AS_CLASS = ("ALiBi", "LogN", "SqrtLogN")
"""Mechanisms that are spelled like their classes; other names are words in lower case."""


def class_path(spec: Any) -> str:
    """The `class_path` of a configured object, or its name alone; "" if there is none."""
    path = spec if isinstance(spec, str) else mapping(spec).get("class_path")
    return str(path or "")


def class_name(spec: Any) -> str:
    """Last part of the `class_path` of a configured object, "" if there is none."""
    return class_path(spec).rsplit(".", 1)[-1]


def modules_to_import(spec: Any) -> list[str]:
    """The modules of all classes of other packages in a configuration, each once."""
    modules: dict[str, None] = {}
    if isinstance(spec, dict):
        path = spec.get("class_path")
        if isinstance(path, str) and "." in path and path.split(".")[0] not in KNOWN_PACKAGES:
            modules[path.rsplit(".", 1)[0]] = None
    values = spec.values() if isinstance(spec, dict) else as_list(spec)
    for value in values:
        if isinstance(value, dict | list):
            modules |= dict.fromkeys(modules_to_import(value))
    return list(modules)


def architecture_label(spec: Any) -> str:
    """`GPT+` for anlit's GPT; the class's name for a model of another package, "" for none."""
    path = class_path(spec)
    name = class_name(path)
    is_of_anlit = path == name or path.startswith("anlit.")
    return ARCHITECTURES.get(name, name) if is_of_anlit else name


def attention_label(spec: Any) -> str:
    """`scale-invariant` for ScaleInvariant, `LogN` for LogN, `plain` for null.

    The labels of a pattern's layers are joined by +.
    """
    if isinstance(spec, list):
        labels = dict.fromkeys(attention_label(layer) for layer in spec)
        return " + ".join(labels) or "plain"
    name = class_name(spec)
    settings = init_args(spec)
    if name == "AttentionPattern":
        return attention_label(settings.get("layers") or [])
    if name == "WarmStart":
        return attention_label(settings.get("mechanism"))
    if name == "SlidingWindow":
        label = attention_label(settings.get("mechanism"))
        return f"{label} in a window of {settings.get('width', '?')}"
    if name in SPELLED_AS_CLASS:
        return name
    with_hyphens = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)
    return with_hyphens.lower() or "plain"


def n_devices(devices: Any) -> int:
    """The number that `trainer.devices` means: 4, "4", [0, 1] or "0,1".

    1 for auto and −1, which depend on the machine.
    """
    if isinstance(devices, str):
        numbers = [number for number in devices.split(",") if number.strip()]
        if "," in devices:
            return len(numbers)
        devices = int(devices) if devices.isdecimal() else None
    if isinstance(devices, list):
        return len(devices)
    return max(1, devices) if isinstance(devices, int) else 1


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is a dictionary, else an empty dictionary."""
    return value if isinstance(value, dict) else {}


def init_args(spec: Any) -> dict[str, Any]:
    """The settings of a configured object, {} if there are none."""
    return mapping(mapping(spec).get("init_args"))


def as_list(value: Any) -> list[Any]:
    """Return a setting as a list. A single object is its only entry, and null has no entry."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]

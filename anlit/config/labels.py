"""A run's configuration as plain values: the name of its file, and names of models for tables."""

import re
from typing import Any

CONFIG = "config.yaml"
"""Name of the configuration file in a run folder."""
ARCHITECTURES = {
    "GPT": "GPT+", "NGPT": "nGPT", "AnGPT": "anGPT",
    "FoldedNGPT": "nGPT (folded)", "FoldedAnGPT": "anGPT (folded)",
}  # fmt: skip
_SPELLED = ("ALiBi", "LogN", "SqrtLogN")
"""Mechanisms whose names are written as their classes; of others the words are, in lower case."""


def class_name(spec: Any) -> str:
    """Last part of the `class_path` of a configured object, "" if there is none."""
    path = spec if isinstance(spec, str) else mapping(spec).get("class_path", "")
    return str(path).rsplit(".", 1)[-1]


def attention_label(spec: Any) -> str:
    """`scale-invariant` for ScaleInvariant, `LogN` for LogN, `plain` for null; a pattern's layers are joined by +."""
    if isinstance(spec, list):
        return " + ".join(dict.fromkeys(attention_label(part) for part in spec)) or "plain"
    name, settings = class_name(spec), init_args(spec)
    if name == "AttentionPattern":
        return attention_label(settings.get("layers") or [])
    if name in ("SlidingWindow", "WarmStart"):
        inner = attention_label(settings.get("mechanism"))
        return (
            inner if name == "WarmStart" else f"{inner} in a window of {settings.get('width', '?')}"
        )
    return (
        name
        if name in _SPELLED
        else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower() or "plain"
    )


def n_devices(devices: Any) -> int:
    """How many `trainer.devices` means: 4, "4", [0, 1] or "0,1"; 1 for what depends on the machine, auto and −1."""
    if isinstance(devices, str):
        devices = (
            [part for part in devices.split(",") if part.strip()] if "," in devices else devices
        )
        devices = int(devices) if isinstance(devices, str) and devices.isdecimal() else devices
    return (
        len(devices)
        if isinstance(devices, list)
        else max(1, devices)
        if isinstance(devices, int)
        else 1
    )


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def init_args(spec: Any) -> dict[str, Any]:
    """The settings of a configured object, {} if there are none."""
    return mapping(mapping(spec).get("init_args"))

"""config.json of a model of transformers as the settings of a GPT+."""

from pathlib import Path
from typing import Any

from anlit.checkpoints.location import refuse_own_code
from anlit.config.objects import shown
from anlit.errors import UserError
from anlit.hub.families import (
    FAMILIES,
    KEYS_WITHOUT_EFFECT,
    OPTIONAL,
    ORIGINAL_LENGTH,
    POSITIONS_SETTINGS,
    REQUIRED_FACTORS,
    REQUIRED_VALUES,
    ROPE_TYPES,
    SETTINGS,
    TYPES,
    Family,
)

CONFIG_JSON = "config.json"
NO_ARGUMENTS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
"""Keys of `rope_parameters` that are not arguments of the positions' class."""


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise UserError with all reasons why GPT+ cannot represent this config.json."""
    family = _find_family(config, folder)
    required = [key for key in SETTINGS if key not in OPTIONAL]
    missing = [key for key in required if (config.get(key) or 0) < 1]
    if missing:
        raise UserError(f"{folder / CONFIG_JSON} has no {', '.join(missing)}: download it again")
    reasons = []
    for key, (required_value, why_required) in REQUIRED_VALUES.items():
        value = config.get(key, required_value)
        if value != required_value:
            reasons.append(f"{key}={shown(value)} ({why_required})")
    if config.get("use_sliding_window"):
        reasons.append("use_sliding_window (windows in some of its layers)")
    rope = _rope_parameters(config, family)
    reasons += _rope_obstacles(rope)
    share = rope["partial_rotary_factor"]
    if share != 1:
        reasons.append(f"partial_rotary_factor={shown(share)} ({family.architecture} ignores it)")
    if reasons:
        raise UserError(
            f"GPT+ cannot represent the model in {folder}, whose {CONFIG_JSON} has "
            f"{', '.join(reasons)}: choose another checkpoint"
        )


def unknown_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys with a value that might change the logits, although import ignores them."""
    known = {*SETTINGS, *TYPES, *REQUIRED_VALUES, *KEYS_WITHOUT_EFFECT}
    return sorted(key for key in config.keys() - known if config[key] not in (None, False))


def _find_family(config: dict[str, Any], folder: Path) -> Family:
    """The family of the `model_type`; UserError if GPT+ does not include it."""
    model_type = config.get("model_type") or ""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    refuse_own_code(config, folder)
    if "anlit" in config:
        raise UserError(
            f"{folder} is in anlit's own form, and needs no import: give it to the command that "
            "uses it, such as anlit generate"
        )
    names = ", ".join(family.name for family in FAMILIES.values())
    raise UserError(
        f"{folder / CONFIG_JSON} has model_type={shown(config.get('model_type'))}, "
        f"an architecture that GPT+ does not include: choose a checkpoint of {names}"
    )


def _rope_obstacles(rope: dict[str, Any]) -> list[str]:
    """The reasons why no positions of GPT+ are this rotation: none or a single one."""
    rope_type = rope["rope_type"]
    if rope_type not in ROPE_TYPES:
        return [f"rope_type={shown(rope_type)} (GPT+ has {', '.join(ROPE_TYPES)})"]
    keys = set(ROPE_TYPES[rope_type].keys)
    unknown = rope.keys() - keys - NO_ARGUMENTS
    if unknown:
        return [f"rope_parameters.{min(unknown)} (the positions of GPT+ have no such setting)"]
    missing = REQUIRED_FACTORS.intersection(keys) - rope.keys()
    if missing:
        return [f"no rope_parameters.{min(missing)} (nothing is assumed in its place)"]
    return []


def gpt_settings(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the GPT+ as plain values, from a config.json that `check_config` accepts."""
    family = FAMILIES[config["model_type"]]
    defaults = OPTIONAL | family.defaults
    settings: dict[str, Any] = {}
    for key, name in SETTINGS.items():
        settings[name] = config.get(key, defaults.get(key))
    settings["qk_norm"] = family.qk_norm
    settings["positions"] = _rotary_positions(config, family)
    width = config.get("sliding_window", family.defaults.get("sliding_window"))
    if family.has_windows and width is not None:
        settings["attention"] = _class_with_arguments("SlidingWindow", width=width)
    else:
        settings["attention"] = _class_with_arguments("Plain")
    return settings


def _class_with_arguments(name: str, **arguments: Any) -> dict[str, Any]:
    """An object of anlit as plain values."""
    plain: dict[str, Any] = {"class_path": f"anlit.{name}"}
    if arguments:
        plain["init_args"] = arguments
    return plain


def _rotary_positions(config: dict[str, Any], family: Family) -> dict[str, Any]:
    rope = _rope_parameters(config, family)
    rope_type = ROPE_TYPES[rope["rope_type"]]
    if ORIGINAL_LENGTH in rope_type.keys:
        rope.setdefault(ORIGINAL_LENGTH, config["max_position_embeddings"])
    arguments = {}
    for key, value in rope.items():
        if key not in NO_ARGUMENTS:
            arguments[POSITIONS_SETTINGS.get(key, key)] = value
    base = rope["rope_theta"]
    return _class_with_arguments(rope_type.class_name, **arguments, fraction=1.0, base=base)


def _rope_parameters(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The keys of the rotary positions that have a value; transformers 4 had them elsewhere."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {key: value for key, value in parameters.items() if value is not None}
    rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
    for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 1.0)):
        rope.setdefault(key, config.get(key) or family.defaults.get(key, default))
    return rope

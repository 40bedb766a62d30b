"""The settings that `anlit export --format huggingface` translates; it refuses all others.

A setting that no table names is refused, unless it has its default. So no new setting is dropped.
Once the export translates a setting, a mechanism or positions, add it to its table.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import nn

import anlit
from anlit.config.objects import parameters_of, recorded_name, to_plain_values
from anlit.errors import UserError
from anlit.nn.layers.positions import Positions
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.training.language_model import LanguageModel

ARCHITECTURES = ("GPT", "NGPT", "AnGPT")
"""The classes of models that the custom code has."""

CONFIG_SETTINGS = {
    "vocab_size",
    "context_length",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "d_model",
    "d_ff",
    "attention",
    "positions",
    "tie_embeddings",
    "norm_eps",
    "qk_norm",
    "qk_norm_gain",
    "qk_norm_eps",
}
"""Settings of the models that both kinds of config.json have: transformers' and the custom code's.

`builtin_models` refuses values of them that transformers lacks.
"""

CUSTOM_CODE_SETTINGS = {"v_norm", "attention_norm", "attention_gate", "post_norm"}
"""Settings of the models that only the custom code has."""

SETTINGS_IN_WEIGHTS = {
    "alpha_scale",
    "s_z_scale",
    "s_qk_scale",
    "s_uv_scale",
    "silu_std",
    "approximation.residual_factor",
    "approximation.error",
}
"""Settings of the models whose effect is in the folded weights."""

TRAINING_SETTINGS = {
    "optimizer",
    "schedule",
    "lr_factors",
    "base_d_model",
    "base_n_layers",
    "init_std",
    "alpha_init",
    "s_z_init",
    "s_qk_init",
    "s_uv_init",
    "norms",
    "dropout",
    "z_loss",
    "qk_clip",
    "document_masking",
    "kernel",
    "runtime.compile",
    "runtime.recompute_every",
    "runtime.meta_init",
    "runtime.float8",
}
"""Settings of training alone: the function of a trained model does not depend on them.

transformers gets documents by `position_ids`, whatever `document_masking` was.
"""


class MechanismSettings(NamedTuple):
    """The arguments of a mechanism that the export translates.

    Args:
        in_config: Written to config.json under their names.
        in_coefficient: Contained in the coefficient or share, whose present value is written.
    """

    in_config: tuple[str, ...] = ()
    in_coefficient: tuple[str, ...] = ()


MECHANISMS: dict[type, MechanismSettings] = {
    anlit.Plain: MechanismSettings(),
    anlit.ScaleInvariant: MechanismSettings(("tau",), ("c", "learned")),
    anlit.LogN: MechanismSettings(("b", "c"), ("s", "learned")),
    anlit.SqrtLogN: MechanismSettings(("a", "b", "c"), ("r", "learned")),
    anlit.ExpectedMaximum: MechanismSettings(),
    anlit.BetaScaling: MechanismSettings((), ("s", "learned")),
    anlit.LogBias: MechanismSettings(("tau",)),
    anlit.ALiBi: MechanismSettings(),
    anlit.SlidingWindow: MechanismSettings(),
    anlit.WarmStart: MechanismSettings((), ("steps",)),
}
"""The mechanisms that `attention_anlit.py` computes."""

INNER_MECHANISMS = ("mechanism", "g", "width")
"""Arguments that the export translates by hand: the mechanism inside, and the window."""

_ROPE = ("fraction", "base")
POSITIONS: dict[type, tuple[str, ...]] = {
    anlit.RoPE: _ROPE,
    anlit.LinearRoPE: ("factor", *_ROPE),
    anlit.Llama3RoPE: ("factor", "training_length", "low_freq_factor", "high_freq_factor", *_ROPE),
    anlit.YaRN: (
        "factor",
        "training_length",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        *_ROPE,
    ),
    anlit.PRoPE: ("base",),
    anlit.NoPE: (),
}
"""The positions that `attention_anlit.py` computes, and their arguments.

Their frequencies are the same at every length.
"""


def unsupported(feature: str) -> UserError:
    """Make the error for a feature that the export cannot translate."""
    return UserError(
        f"--format huggingface cannot hold {feature}, which its code does not support: "
        "use --format safetensors, which anlit loads"
    )


def refuse_dropped_settings(model: LanguageModel) -> None:
    """Raise UserError if the export would drop a setting of a model or its attention."""
    architecture = recorded_name(type(model))
    if architecture not in ARCHITECTURES:
        raise unsupported(f"the architecture {architecture}")
    translated = CONFIG_SETTINGS | CUSTOM_CODE_SETTINGS | SETTINGS_IN_WEIGHTS | TRAINING_SETTINGS
    for setting in changed_settings(model, translated):
        raise unsupported(setting)
    for block in model.model.blocks:
        _refuse_positions(block.positions)
        _refuse_mechanism(block.attention.mechanism)


def changed_settings(model: LanguageModel, translated: Collection[str]) -> list[str]:
    """Return, as `name=value`, the changed settings that are not translated."""
    changed = []
    for name, value, default in settings_with_defaults(type(model), model.hparams):
        if name not in translated and _plain(value) != _plain(default):
            changed.append(f"{name}={_plain(value)}")
    return changed


def settings_with_defaults(
    architecture: type[LanguageModel], settings: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of each setting; dataclasses, as `runtime`, by their fields."""
    for parameter in parameters_of(architecture):
        value = settings.get(parameter.name, parameter.default)
        if not is_dataclass(parameter.default):
            yield parameter.name, value, parameter.default
            continue
        for field in fields(parameter.default):
            default = getattr(parameter.default, field.name)
            yield f"{parameter.name}.{field.name}", getattr(value, field.name), default


def changed_arguments(described: nn.Module, translated: Collection[str]) -> list[str]:
    """Return, as `Class.name=value`, the changed arguments of a mechanism or of positions."""
    kind = type(described)
    changed = []
    for parameter in parameters_of(kind):
        value = _plain(getattr(described, parameter.name))
        if parameter.name not in translated and value != _plain(parameter.default):
            changed.append(f"{kind.__name__}.{parameter.name}={value}")
    return changed


def _refuse_mechanism(mechanism: Mechanism) -> None:
    kind = type(mechanism)
    if kind not in MECHANISMS:
        raise unsupported(f"attention {kind.__name__}")
    arguments = MECHANISMS[kind]
    translated = arguments.in_config + arguments.in_coefficient + INNER_MECHANISMS
    for argument in changed_arguments(mechanism, translated):
        raise unsupported(argument)
    for inner in mechanism.children():
        if isinstance(inner, Mechanism):
            _refuse_mechanism(inner)


def _refuse_positions(positions: Positions) -> None:
    kind = type(positions)
    if kind not in POSITIONS:
        raise unsupported(f"positions {kind.__name__}")
    for argument in changed_arguments(positions, POSITIONS[kind]):
        raise unsupported(argument)


def _plain(value: Any) -> Any:
    return to_plain_values({"value": value}).get("value")

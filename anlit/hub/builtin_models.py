"""GPT+ in architectures of transformers that compute exactly the same."""

from typing import Any

import torch
from torch import Tensor

from anlit.config.objects import module_to_plain_values
from anlit.hub.families import (
    FAMILIES,
    POSITIONS_SETTINGS,
    REQUIRED_VALUES,
    ROPE_TYPES,
    Family,
    weight_names,
)
from anlit.hub.translated_settings import (
    CONFIG_SETTINGS,
    TRAINING_SETTINGS,
    changed_arguments,
    changed_settings,
)
from anlit.nn.layers import positions
from anlit.nn.layers.norms import RMSNorm
from anlit.nn.mechanisms.plain import Plain
from anlit.nn.mechanisms.sliding_window import SlidingWindow
from anlit.nn.models.decoder import Decoder
from anlit.training.language_model import LanguageModel

ROPE_TYPE_BY_CLASS = {
    getattr(positions, rope.class_name): rope_type for rope_type, rope in ROPE_TYPES.items()
}


def find_model_type(model: LanguageModel, origin: str | None = None) -> str | None:
    """Find the model_type of an architecture that can be this GPT+: `origin` if it can.

    None if there is none.
    """
    if changed_settings(model, CONFIG_SETTINGS | TRAINING_SETTINGS):
        return None
    decoder: Any = model.model
    rope = decoder.blocks[0].positions
    distinct_positions = {str(module_to_plain_values(block.positions)) for block in decoder.blocks}
    distinct_windows = {block.attention.mechanism.window for block in decoder.blocks}
    if not all(map(_has_common_settings, decoder.blocks)):
        return None
    if len(distinct_positions) > 1 or len(distinct_windows) > 1:
        return None
    if type(rope) not in ROPE_TYPE_BY_CLASS or rope.fraction != 1:
        return None
    if changed_arguments(rope, _rope_arguments(rope)):
        return None
    fitting = [kind for kind, family in FAMILIES.items() if _fits(decoder, family)]
    if origin in fitting:
        return origin
    return fitting[0] if fitting else None


def _fits(decoder: Any, family: Family) -> bool:
    """Whether a family has the decoder's QK-norm, windows and sizes."""
    block = decoder.blocks[0]
    if family.qk_norm != isinstance(block.norm_q, RMSNorm):
        return False
    # Llama's configuration needs heads that divide the width.
    is_llama = family.architecture == "LlamaForCausalLM"
    if is_llama and decoder.embedding.embedding_dim % block.n_heads != 0:
        return False
    return family.has_windows or block.attention.mechanism.window is None


def _has_common_settings(block: Any) -> bool:
    """Whether a block of GPT+ has no setting that all families lack."""
    mechanism = block.attention.mechanism
    if type(mechanism) is SlidingWindow:
        if changed_arguments(mechanism, ("width", "mechanism")):
            return False
        mechanism = mechanism.mechanism
    if type(mechanism) is not Plain or changed_arguments(mechanism, ()):
        return False
    return not isinstance(block.norm_q, RMSNorm) or block.norm_q.eps == block.norm_1.eps


def config_sizes(decoder: Any, context_length: int) -> dict[str, Any]:
    """The sizes of a decoder under transformers' names."""
    block = decoder.blocks[0]
    vocab_size, d_model = decoder.embedding.weight.shape
    return {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "intermediate_size": block.W_u.out_features,
        "num_hidden_layers": len(decoder.blocks),
        "num_attention_heads": block.n_heads,
        "num_key_value_heads": block.n_kv_heads,
        "head_dim": block.d_head,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": decoder.tie_embeddings,
    }


def config_json(decoder: Any, context_length: int, model_type: str) -> dict[str, Any]:
    """The architecture's config.json, without the ids of special tokens."""
    family = FAMILIES[model_type]
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    config |= config_sizes(decoder, context_length)
    block = decoder.blocks[0]
    config["rms_norm_eps"] = block.norm_1.eps
    for key, required in REQUIRED_VALUES.items():
        if required.value is not None:
            config[key] = required.value
    config |= _rope_settings(block.positions)
    if family.has_windows:
        config["sliding_window"] = block.attention.mechanism.window
    return config


def _rope_arguments(rope: Any) -> list[str]:
    """The arguments of a rotation that the architectures of transformers have, by our names."""
    keys = ROPE_TYPES[ROPE_TYPE_BY_CLASS[type(rope)]].keys
    return ["fraction", "base", *(POSITIONS_SETTINGS.get(key, key) for key in keys)]


def _rope_settings(rope: Any) -> dict[str, Any]:
    """The rotation for config.json: the keys of transformers 5 and of older readers."""
    rope_type = ROPE_TYPE_BY_CLASS[type(rope)]
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in ROPE_TYPES[rope_type].keys:
        value = getattr(rope, POSITIONS_SETTINGS.get(key, key))
        if value is not None:
            scaling[key] = value
    settings = {
        "rope_theta": rope.base,
        "rope_parameters": {**scaling, "rope_theta": rope.base},
    }
    if rope_type != "default":
        settings["rope_scaling"] = scaling
    return settings


def renamed_weights(decoder: Decoder) -> dict[str, Tensor]:
    """The weights by transformers' names.

    A tied head is left out. A QK-norm without gain gets a gain of ones.
    """
    weights = decoder.state_dict()
    if decoder.tie_embeddings:
        del weights["head.weight"]
    for name, module in decoder.named_modules():
        is_qk_norm = name.endswith((".norm_q", ".norm_k"))
        if is_qk_norm and isinstance(module, RMSNorm) and module.gain is None:
            weights[f"{name}.gain"] = torch.ones(module.width)
    hub_names = {name: key for key, name in weight_names(len(decoder.blocks)).items()}
    return {hub_names[name]: tensor for name, tensor in weights.items()}

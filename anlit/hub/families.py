"""GPT+ and models of transformers: tables that import and export both read.

A table's key is a key of config.json or a tensor of transformers. Its value is the setting or the
weight of GPT+.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
OPTIONAL = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""The values of transformers for missing keys of `SETTINGS`; a family may have other values.

All other keys are required.
"""

TYPES: dict[str, type] = {
    "model_type": str,
    **dict.fromkeys([key for key in SETTINGS if key not in OPTIONAL], int),
    "sliding_window": int,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
}
"""The types of the keys that import reads, if they are present and not null."""


class RequiredValue(NamedTuple):
    """The only value of a key that GPT+ can represent. A missing key has it too."""

    value: Any
    reason: str


REQUIRED_VALUES = {
    "hidden_act": RequiredValue("silu", "the MLP of GPT+ is a SwiGLU"),
    "attention_bias": RequiredValue(False, "GPT+ has no biases"),
    "mlp_bias": RequiredValue(False, "GPT+ has no biases"),
    "quantization_config": RequiredValue(None, "GPT+ has no quantised weights"),
}

KEYS_WITHOUT_EFFECT = {
    # Of the file and its software
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    # Of training, generation, other tasks and other outputs
    "attention_dropout",
    "bos_token_id",
    "chunk_size_feed_forward",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "use_cache",
    # Of windows in some layers, which `use_sliding_window` turns on
    "layer_types",
    "max_window_layers",
    # Read with the rotation and the windows
    "partial_rotary_factor",
    "rope_theta",
    "use_sliding_window",
}
"""Keys of config.json that change no logit, or that import reads apart from these tables."""

ORIGINAL_LENGTH = "original_max_position_embeddings"
POSITIONS_SETTINGS = {ORIGINAL_LENGTH: "training_length"}
"""Settings of positions that GPT+ names differently."""


class RopeType(NamedTuple):
    """A `rope_type` of transformers.

    Args:
        class_name: The class of the positions.
        keys: Its settings without base and fraction, under transformers' names.
    """

    class_name: str
    keys: tuple[str, ...]


ROPE_TYPES = {
    "default": RopeType("RoPE", ()),
    "linear": RopeType("LinearRoPE", ("factor",)),
    "llama3": RopeType(
        "Llama3RoPE", ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor")
    ),
    "yarn": RopeType(
        "YaRN",
        ("factor", ORIGINAL_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
}
REQUIRED_FACTORS = {"factor", "low_freq_factor", "high_freq_factor"}
"""Settings of positions without which a checkpoint is refused."""

WEIGHTS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm_f.gain",
    "lm_head.weight": "head.weight",
}
LAYER_WEIGHTS = {
    "input_layernorm.weight": "norm_1.gain",
    "post_attention_layernorm.weight": "norm_2.gain",
    "self_attn.q_proj.weight": "W_q.weight",
    "self_attn.k_proj.weight": "W_k.weight",
    "self_attn.v_proj.weight": "W_v.weight",
    "self_attn.o_proj.weight": "W_o.weight",
    "self_attn.q_norm.weight": "norm_q.gain",
    "self_attn.k_norm.weight": "norm_k.gain",
    "mlp.up_proj.weight": "W_u.weight",
    "mlp.gate_proj.weight": "W_z.weight",
    "mlp.down_proj.weight": "W_d.weight",
}
"""Weights of a layer: after `model.layers.N.` in transformers, after `blocks.N.` in GPT+."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that is GPT+ with certain settings.

    Like GPT+, all of them use half-split pairs for the rotation and normalise heads before it.

    Args:
        name: Its name in messages.
        architecture: Its class in transformers.
        qk_norm: Whether queries and keys are normalised.
        has_windows: Whether `sliding_window` applies, in all layers.
        defaults: Its values for missing keys that differ from `OPTIONAL`.
    """

    name: str
    architecture: str
    qk_norm: bool = False
    has_windows: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", qk_norm=True, defaults={"head_dim": 128}),
    "llama": Family("Llama", "LlamaForCausalLM"),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", has_windows=True, defaults={"sliding_window": 4096}
    ),
}
"""By `model_type`. An export takes the first family that fits."""


def weight_names(n_layers: int) -> dict[str, str]:
    """The name of each weight in GPT+, by its name in transformers."""
    names = dict(WEIGHTS)
    for layer in range(n_layers):
        for hub_name, name in LAYER_WEIGHTS.items():
            names[f"model.layers.{layer}.{hub_name}"] = f"blocks.{layer}.{name}"
    return names

"""What GPT+ has in common with models of transformers: tables that import and export both read.

A table's key is a key of config.json or a tensor of transformers, its value the setting or the weight of GPT+.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

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
"""What transformers takes if a key of `SETTINGS` is missing; a family may have other values. The rest must be there."""

TYPES: dict[str, type] = {
    "model_type": str,
    **dict.fromkeys([key for key in SETTINGS if key not in OPTIONAL], int),
    **dict.fromkeys(("sliding_window", "no_rope_layer_interval", "max_window_layers"), int),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys(("layer_types", "no_rope_layers"), list),
}
"""The types of keys that import reads, where they are there and not null."""

MUST_BE: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the MLP of GPT+ is a SwiGLU"),
    "attention_bias": (False, "GPT+ has no biases"),
    "mlp_bias": (False, "GPT+ has no biases"),
    "quantization_config": (None, "GPT+ has no quantised weights"),
}
"""The only value that GPT+ can be, which is also the one of a missing key, and why."""

ORIGINAL_LENGTH = "original_max_position_embeddings"
OUR_NAMES = {ORIGINAL_LENGTH: "training_length"}
"""Our names of settings of positions; the others have the same names."""
ROPE: dict[str, tuple[str, tuple[str, ...]]] = {
    "default": ("RoPE", ()),
    "linear": ("LinearRoPE", ("factor",)),
    "llama3": ("Llama3RoPE", ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor")),
    "yarn": (
        "YaRN",
        ("factor", ORIGINAL_LENGTH, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
}
"""`rope_type`: the class of the positions, and its settings without base and fraction."""
FACTORS = {"factor", "low_freq_factor", "high_freq_factor"}
"""Settings without which a checkpoint is refused."""

WEIGHTS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm_f.gain",
    "lm_head.weight": "head.weight",
}
WEIGHTS_OF_LAYER = {
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
"""Those of `model.layers.N.` are those of `blocks.N.`."""


@dataclass(frozen=True)
class Family:
    """An architecture of transformers that is GPT+ with certain settings.

    Like GPT+, all of them use half-split pairs for the rotation and normalise heads before it.

    Args:
        qk_norm: Whether queries and keys are normalised.
        windows: Where `sliding_window` applies: nowhere, in all layers, or in those that `layer_types` names.
        nope: Whether `no_rope_layers` takes the rotation from some layers.
        defaults: What it takes for missing keys, where this is not that of `OPTIONAL`.
    """

    name: str
    architecture: str
    qk_norm: bool = False
    windows: Literal["nowhere", "in all", "in some"] = "nowhere"
    nope: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family(
        "Qwen3", "Qwen3ForCausalLM", qk_norm=True, windows="in some", defaults={"head_dim": 128}
    ),
    "llama": Family("Llama", "LlamaForCausalLM"),
    "mistral": Family(
        "Mistral", "MistralForCausalLM", windows="in all", defaults={"sliding_window": 4096}
    ),
    "smollm3": Family(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        windows="in some",
        nope=True,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}
"""By `model_type`. An export takes the first that fits."""


def our_names(n_layers: int) -> dict[str, str]:
    """transformers' name of each weight, and ours."""
    layers = range(n_layers)
    return WEIGHTS | {
        f"model.layers.{n}.{theirs}": f"blocks.{n}.{ours}"
        for n in layers
        for theirs, ours in WEIGHTS_OF_LAYER.items()
    }

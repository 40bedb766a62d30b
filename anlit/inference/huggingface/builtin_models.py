"""GPT+ in architectures of transformers that compute exactly the same.

    rotary fraction 1, QK-norm      Qwen3
    rotary fraction 1, no QK-norm   Llama
    another fraction, either        Glm4Moe with no expert layer: all of its first `first_k_dense_replace` layers are
                                    plain SwiGLU blocks, and it has partial rotary positions and QK-norm per head

Like GPT+, all of them use half-split pairs for the rotation and normalise heads before it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from anlit.attention.mechanisms.plain import Plain
from anlit.layers.norms import RMSNorm
from anlit.layers.positions import RoPE
from anlit.models.decoder import Decoder

OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm_f.gain": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_BLOCK = {
    "norm_1.gain": "input_layernorm.weight",
    "norm_2.gain": "post_attention_layernorm.weight",
    "W_q.weight": "self_attn.q_proj.weight",
    "W_k.weight": "self_attn.k_proj.weight",
    "W_v.weight": "self_attn.v_proj.weight",
    "W_o.weight": "self_attn.o_proj.weight",
    "norm_q.gain": "self_attn.q_norm.weight",
    "norm_k.gain": "self_attn.k_norm.weight",
    "W_u.weight": "mlp.up_proj.weight",
    "W_z.weight": "mlp.gate_proj.weight",
    "W_d.weight": "mlp.down_proj.weight",
}
GLM_WITHOUT_EXPERTS = {
    "n_routed_experts": 2,  # no layer has experts, but the configuration needs a number
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "num_nextn_predict_layers": 0,
}


def their_name(name: str) -> str:
    """transformers' name of one of our weights."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{IN_BLOCK[rest]}"


def reason_against(decoder: Decoder) -> str | None:
    """Why no architecture of transformers can be this GPT+; None if one can."""
    for part in decoder.blocks:
        block: Any = part
        if type(block.attention.mechanism) is not Plain:
            return f"attention {type(block.attention.mechanism).__name__}"
        if type(block.positions) is not RoPE:
            return f"positions {type(block.positions).__name__}"
        norms = (block.norm_v, block.output.norm, block.post_norm_A)
        if block.output.W_g is not None or not all(isinstance(module, nn.Identity) for module in norms):
            return "attention_gate, v_norm, attention_norm or post_norm"
        if isinstance(block.norm_q, RMSNorm) and block.norm_q.eps != block.norm_1.eps:
            return "qk_norm_eps"
    return None


def configuration(decoder: Decoder, context_length: int) -> dict[str, Any]:
    """The architecture's config.json, without the ids of special tokens."""
    block: Any = decoder.blocks[0]
    rope = block.positions
    has_qk_norm = isinstance(block.norm_q, RMSNorm)
    vocab_size, d_model = decoder.embedding.weight.shape
    shared = {
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "intermediate_size": block.W_u.out_features,
        "num_hidden_layers": len(decoder.blocks),
        "num_attention_heads": block.n_heads,
        "num_key_value_heads": block.n_heads,
        "head_dim": d_model // block.n_heads,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": block.norm_1.eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.base},
    }
    if rope.fraction == 1:
        name, kind = ("Qwen3ForCausalLM", "qwen3") if has_qk_norm else ("LlamaForCausalLM", "llama")
        return {"architectures": [name], "model_type": kind, **shared}
    shared["rope_parameters"]["partial_rotary_factor"] = rope.fraction
    shared |= {"use_qk_norm": has_qk_norm, "first_k_dense_replace": len(decoder.blocks), **GLM_WITHOUT_EXPERTS}
    return {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **shared}


def weights(decoder: Decoder) -> dict[str, Tensor]:
    """The weights by transformers' names; a QK-norm without gain gets a gain of ones."""
    found = {their_name(name): tensor for name, tensor in decoder.state_dict().items()}
    for number, part in enumerate(decoder.blocks):
        block: Any = part
        for name in ("norm_q", "norm_k"):
            norm = getattr(block, name)
            if isinstance(norm, RMSNorm) and norm.gain is None:
                found[their_name(f"blocks.{number}.{name}.gain")] = torch.ones(norm.width)
    return found

"""GPT+ in architectures of transformers that compute exactly the same."""

from typing import Any

import torch
from torch import Tensor, nn

from anlit.config.objects import module_to_plain_values
from anlit.hub.families import FAMILIES, MUST_BE, OUR_NAMES, ROPE, our_names
from anlit.nn.layers import positions
from anlit.nn.layers.norms import RMSNorm
from anlit.nn.layers.positions import NoPE
from anlit.nn.mechanisms.plain import Plain
from anlit.nn.mechanisms.sliding_window import SlidingWindow
from anlit.nn.models.decoder import Decoder

ROPE_TYPES = {getattr(positions, name): rope_type for rope_type, (name, _) in ROPE.items()}


def family_of(decoder: Any, origin: str | None = None) -> str | None:
    """The model_type of the architecture that can be this GPT+: `origin` if it can; None if there is none."""
    rotary, windows = _rotary(decoder), _windows(decoder)
    if (
        not all(map(_is_common, decoder.blocks))
        or len({str(module_to_plain_values(part)) for part in rotary}) != 1
    ):
        return None
    if (
        type(rotary[0]) not in ROPE_TYPES
        or rotary[0].fraction != 1
        or len({width for width in windows if width}) > 1
    ):
        return None
    block, n_plain = decoder.blocks[0], len(decoder.blocks) - len(rotary)
    is_whole = (
        decoder.embedding.embedding_dim % block.n_heads == 0
    )  # which Llama's configuration asks for
    fitting = [
        kind
        for kind, family in FAMILIES.items()
        if family.qk_norm == isinstance(block.norm_q, RMSNorm)
        and (family.nope or not n_plain)
        and (
            not any(windows)
            or {"nowhere": False, "in all": all(windows), "in some": True}[family.windows]
        )
        and (family.architecture != "LlamaForCausalLM" or is_whole)
    ]
    return origin if origin in fitting else next(iter(fitting), None)


def _is_common(block: Any) -> bool:
    """Whether a block of GPT+ has no setting that all families lack."""
    mechanism = block.attention.mechanism
    inner = mechanism.mechanism if type(mechanism) is SlidingWindow else mechanism
    norms = (block.norm_v, block.output.norm, block.post_norm_A)
    return (
        type(inner) is Plain
        and block.output.W_g is None
        and all(isinstance(module, nn.Identity) for module in norms)
        and (not isinstance(block.norm_q, RMSNorm) or block.norm_q.eps == block.norm_1.eps)
    )


def _rotary(decoder: Any) -> list[Any]:
    """The positions of the layers that have a rotation."""
    return [block.positions for block in decoder.blocks if type(block.positions) is not NoPE]


def _windows(decoder: Any) -> list[int | None]:
    return [block.attention.mechanism.window for block in decoder.blocks]


def sizes(decoder: Any, context_length: int) -> dict[str, Any]:
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


def configuration(decoder: Any, context_length: int, model_type: str) -> dict[str, Any]:
    """The architecture's config.json, without the ids of special tokens."""
    family, windows, rope = FAMILIES[model_type], _windows(decoder), _rotary(decoder)[0]
    record: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    record |= sizes(decoder, context_length)
    record["rms_norm_eps"] = decoder.blocks[0].norm_1.eps
    record |= {key: value for key, (value, _) in MUST_BE.items() if value is not None}
    rope_type = ROPE_TYPES[type(rope)]
    keys = {key: getattr(rope, OUR_NAMES.get(key, key)) for key in ROPE[rope_type][1]}
    scaling = {
        "rope_type": rope_type,
        **{key: value for key, value in keys.items() if value is not None},
    }
    # The keys of transformers 5 and those of older readers.
    record |= {"rope_theta": rope.base, "rope_parameters": {**scaling, "rope_theta": rope.base}}
    if rope_type != "default":
        record["rope_scaling"] = scaling
    if family.windows != "nowhere":
        record["sliding_window"] = next((width for width in windows if width), None)
    if family.windows == "in some":
        record["use_sliding_window"] = any(windows)
        record["layer_types"] = [
            "sliding_attention" if width else "full_attention" for width in windows
        ]
    if family.nope:
        record["no_rope_layers"] = [
            int(type(block.positions) is not NoPE) for block in decoder.blocks
        ]
    return record


def weights(decoder: Decoder) -> dict[str, Tensor]:
    """The weights by transformers' names, one matrix for a tied head; a QK-norm without gain gets a gain of ones."""
    ours = decoder.state_dict()
    if decoder.tie_embeddings:
        del ours["head.weight"]
    for name, module in decoder.named_modules():
        if (
            name.endswith((".norm_q", ".norm_k"))
            and isinstance(module, RMSNorm)
            and module.gain is None
        ):
            ours[f"{name}.gain"] = torch.ones(module.width)
    theirs = {name: key for key, name in our_names(len(decoder.blocks)).items()}
    return {theirs[name]: tensor for name, tensor in ours.items()}

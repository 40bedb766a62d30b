"""nGPT, anGPT, and GPT+ with settings that transformers lacks, for the code in `modeling_anlit.py`.

nGPT and anGPT are written folded (`anlit.nn.models.fold`). The coefficients of mechanisms, learned or not, are numbers
in config.json.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anlit
from anlit.errors import UserError
from anlit.hub.builtin_models import sizes
from anlit.nn.layers.positions import LinearRoPE, Llama3RoPE, NoPE, Positions, PRoPE, RoPE, YaRN
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models.fold import Stored, fold
from anlit.training.load_model import Checkpoint

MODULE = "modeling_anlit"
CODE = [Path(__file__).parent / f"{name}.py" for name in (MODULE, "attention_anlit")]
"""Copied into the folders. Only these files import transformers."""
ARCHITECTURES = {
    "GPT": "GPT",
    "NGPT": "NGPT",
    "FoldedNGPT": "NGPT",
    "AnGPT": "AnGPT",
    "FoldedAnGPT": "AnGPT",
}
CONSTANTS: dict[type, tuple[str, ...]] = {
    anlit.Plain: (),
    anlit.ScaleInvariant: ("tau",),
    anlit.LogN: ("b", "c"),
    anlit.SqrtLogN: ("a", "b", "c"),
    anlit.ExpectedMaximum: (),
    anlit.BetaScaling: (),
    anlit.LogBias: ("tau",),
    anlit.ALiBi: (),
}
"""The mechanisms that the code supports, and their settings apart from the coefficient."""


def exported(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json without the ids of special tokens, and the weights; UserError for what the code does not support."""
    if checkpoint.architecture not in ARCHITECTURES:
        raise _refusal(f"the architecture {checkpoint.architecture}")
    name = ARCHITECTURES[checkpoint.architecture]
    decoder = checkpoint.model.model
    if name == "AnGPT" and decoder.blocks[0].s_qk is not None:
        raise _refusal("an s_qk of anGPT")
    if name != "GPT" and not isinstance(decoder.s_z, Stored):
        decoder = fold(decoder)
    record = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": f"anlit_{name.lower()}",
        "auto_map": {
            "AutoConfig": f"{MODULE}.{name}Config",
            "AutoModelForCausalLM": f"{MODULE}.{name}ForCausalLM",
        },
        **_configuration(decoder, checkpoint.longest_context),
    }
    return record, _weights(decoder)


def _configuration(decoder: Any, context_length: int) -> dict[str, Any]:
    blocks: list[Any] = list(decoder.blocks)
    block = blocks[0]
    norm = getattr(block, "norm_qk", None) or block.norm_q  # a UnitNorm has neither eps nor gain
    qk_norm = {"eps": getattr(norm, "eps", 0.0), "gain": getattr(norm, "gain", None) is not None}
    post_norm = getattr(block, "post_norm", None) or getattr(block, "post_norm_A", nn.Identity())
    gate = block.output.W_g
    rotations = [_rotation(each.positions, block.d_head) for each in blocks]
    distinct = [
        rotation for number, rotation in enumerate(rotations) if rotation not in rotations[:number]
    ]
    return {
        **sizes(decoder, context_length),
        "mechanisms": [_mechanism(each.attention.mechanism) for each in blocks],
        "rotations": distinct,
        "positions": [distinct.index(rotation) for rotation in rotations],
        "qk_norm": None if isinstance(norm, nn.Identity) else qk_norm,
        "norm_eps": block.norm_1.eps if hasattr(block, "norm_1") else 0.0,
        "v_norm": not isinstance(block.norm_v, nn.Identity),
        "output_norm": not isinstance(block.output.norm, nn.Identity),
        "post_norm": not isinstance(post_norm, nn.Identity),
        "gate": "none"
        if gate is None
        else "per_head"
        if gate.out_features == block.n_heads
        else "per_element",
    }


def _mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """A layer's mechanism as plain values; a coefficient per head or one for all is a list of numbers."""
    if isinstance(mechanism, anlit.SlidingWindow):
        return {**_mechanism(mechanism.mechanism), "window": mechanism.window}
    if isinstance(mechanism, anlit.WarmStart):
        inner = _mechanism(mechanism.mechanism)
        return {
            **inner,
            "share": inner.get("share", 1.0) * float(mechanism.share),
        }  # w of w is their product
    kind = type(mechanism)
    if kind not in CONSTANTS:
        raise _refusal(f"attention {kind.__name__}")
    plain: dict[str, Any] = {
        "name": kind.__name__,
        **{key: getattr(mechanism, key) for key in CONSTANTS[kind]},
    }
    coefficient = getattr(mechanism, "strength", None) or getattr(mechanism, "decay", None)
    if coefficient is not None:
        plain["strength"] = torch.as_tensor(coefficient()).flatten().tolist()
    if isinstance(mechanism, anlit.LogBias):
        plain["g"] = _mechanism(mechanism.g)
    return plain


def _rotation(positions: Positions, d_head: int) -> dict[str, Any]:
    if type(positions) is NoPE:
        return {"frequencies": [], "scale": 1.0}
    if type(positions) not in (
        RoPE,
        LinearRoPE,
        Llama3RoPE,
        YaRN,
        PRoPE,
    ):  # their frequencies are those of any length
        raise _refusal(f"positions {type(positions).__name__}")
    return {"frequencies": positions.frequencies(d_head, 1).tolist(), "scale": positions.scale}


def _weights(decoder: Any) -> dict[str, Tensor]:
    """The weights by the decoder's names, without the mechanisms' coefficients, and with an s_qk for every nGPT."""
    weights = {
        name.removesuffix(".vector"): tensor
        for name, tensor in decoder.state_dict().items()
        if ".attention." not in name and not name.startswith("shared_coefficients.")
    }
    if decoder.tie_embeddings:
        del weights["head.weight"]
    for number, block in enumerate(decoder.blocks):
        if hasattr(block, "norm_qk") and block.s_qk is None:
            factor = getattr(block.norm_qk, "factor", 1.0)
            weights[f"blocks.{number}.s_qk"] = torch.full((block.W_q.out_features,), float(factor))
    return weights


def _refusal(what: str) -> UserError:
    return UserError(
        f"--format huggingface cannot hold {what}, which its code does not support: use --format safetensors, which "
        "anlit loads"
    )

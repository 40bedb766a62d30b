"""nGPT, anGPT, and GPT+ with settings that transformers lacks, for `modeling_anlit.py`.

nGPT and anGPT are written folded (`anlit.nn.models.fold`). The coefficients of mechanisms, learned
or not, are numbers in config.json.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anlit
from anlit.checkpoints.location import MODEL_TYPE_PREFIX
from anlit.hub.builtin_models import config_sizes
from anlit.hub.translated_settings import MECHANISMS
from anlit.nn.layers.positions import NoPE, Positions
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models.fold import fold
from anlit.training.load_model import Checkpoint

MODULE = "modeling_anlit"
CODE_FILES = [Path(__file__).parent / f"{name}.py" for name in (MODULE, "attention_anlit")]
"""Copied into the folders. Only these files import transformers."""


def export(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make config.json, without the ids of special tokens, and the weights.

    The settings are such that `refuse_dropped_settings` accepts them.
    """
    name = checkpoint.architecture
    decoder = checkpoint.model.model
    if name != "GPT":
        decoder = fold(decoder)
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": f"{MODEL_TYPE_PREFIX}{name.lower()}",
        "auto_map": {
            "AutoConfig": f"{MODULE}.{name}Config",
            "AutoModelForCausalLM": f"{MODULE}.{name}ForCausalLM",
        },
        **_model_settings(decoder, checkpoint),
    }
    return config, _export_weights(decoder)


def _model_settings(decoder: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Sizes, mechanisms, rotations and settings of the blocks, for config.json."""
    blocks: list[Any] = list(decoder.blocks)
    block = blocks[0]
    norm = getattr(block, "norm_qk", None) or block.norm_q
    qk_norm = None
    if not isinstance(norm, nn.Identity):  # a UnitNorm has neither eps nor gain
        has_gain = getattr(norm, "gain", None) is not None
        qk_norm = {"eps": getattr(norm, "eps", 0.0), "gain": has_gain}
    settings = checkpoint.model.hparams
    rotations = [_rotation_settings(layer.positions, block.d_head) for layer in blocks]
    distinct_rotations: list[dict[str, Any]] = []
    for rotation in rotations:
        if rotation not in distinct_rotations:
            distinct_rotations.append(rotation)
    return {
        **config_sizes(decoder, checkpoint.longest_context),
        "mechanisms": [_mechanism_settings(layer.attention.mechanism) for layer in blocks],
        "rotations": distinct_rotations,
        "positions": [distinct_rotations.index(rotation) for rotation in rotations],
        "qk_norm": qk_norm,
        "norm_eps": block.norm_1.eps if hasattr(block, "norm_1") else 0.0,
        "v_norm": settings["v_norm"],
        "output_norm": settings["attention_norm"],
        "post_norm": settings["post_norm"],
        "gate": settings["attention_gate"],
    }


def _mechanism_settings(mechanism: Mechanism) -> dict[str, Any]:
    """A layer's mechanism as plain values; `strength` is a list, per head or for all heads."""
    if isinstance(mechanism, anlit.SlidingWindow):
        return {**_mechanism_settings(mechanism.mechanism), "window": mechanism.window}
    if isinstance(mechanism, anlit.WarmStart):
        inner = _mechanism_settings(mechanism.mechanism)
        # The share of a warm start inside a warm start is the product.
        return {**inner, "share": inner.get("share", 1.0) * float(mechanism.share)}
    kind = type(mechanism)
    settings: dict[str, Any] = {"name": kind.__name__}
    for key in MECHANISMS[kind].in_config:
        settings[key] = getattr(mechanism, key)
    coefficient = getattr(mechanism, "strength", None) or getattr(mechanism, "decay", None)
    if coefficient is not None:
        settings["strength"] = torch.as_tensor(coefficient()).flatten().tolist()
    if isinstance(mechanism, anlit.LogBias):
        settings["g"] = _mechanism_settings(mechanism.g)
    return settings


def _rotation_settings(positions: Positions, d_head: int) -> dict[str, Any]:
    if type(positions) is NoPE:
        return {"frequencies": [], "scale": 1.0}
    return {"frequencies": positions.frequencies(d_head, 1).tolist(), "scale": positions.scale}


def _export_weights(decoder: Any) -> dict[str, Tensor]:
    """The weights by the decoder's names, without the mechanisms' coefficients.

    Every nGPT gets an s_qk.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in decoder.state_dict().items():
        if ".attention." not in name and not name.startswith("shared_coefficients."):
            weights[name.removesuffix(".vector")] = tensor
    if decoder.tie_embeddings:
        del weights["head.weight"]
    for number, block in enumerate(decoder.blocks):
        if hasattr(block, "norm_qk") and block.s_qk is None:
            factor = float(getattr(block.norm_qk, "factor", 1.0))
            weights[f"blocks.{number}.s_qk"] = torch.full((block.W_q.out_features,), factor)
    return weights

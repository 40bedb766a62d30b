"""A checkpoint of transformers, Qwen3 above all, as a GPT+."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anlit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
SIZES = (
    "vocab_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
)
KNOWN = {"qwen3": "Qwen3", "llama": "Llama", "glm4_moe": "GLM-4 MoE"}


def import_huggingface(source: str, output: str, context_length: int | None = None) -> list[str]:
    """Write the Qwen3 in the folder `source` as a GPT+ into the folder `output`, in the form of `anlit export`.

    Llama, and GLM-4 MoE without expert layers, are read too, because `anlit export` writes them for other settings of
    GPT+.

    Args:
        source: A folder with config.json and model.safetensors, or its parts and their index.
        output: Created if missing.
        context_length: Tokens in a training sequence; None for max_position_embeddings.

    Returns:
        Sentences on changes to the weights that do not change what the model computes.

    Raises:
        UserError: The folder is damaged or has no such model, GPT+ cannot be that model, or `output` is not empty.
    """
    from anlit.checkpoints.exported import PREFIX, TOKENIZER, write_exported
    from anlit.inference.export import new_folder

    folder, target = Path(source), new_folder(output)
    record = _read_json(folder / CONFIG, "give a folder that holds a Qwen3 of transformers")
    refuse(record, folder)
    read = read_weights(folder)
    _check_layers(read, record, folder)
    settings, shapes = _model(record, context_length)
    weights, notes = as_gpt(read, record)
    _check(weights, shapes, folder)
    content = {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "anlit": {"architecture": "GPT", "data": None},
        "global_step": 0,
    }
    tokenizer = folder / TOKENIZER
    ends = record.get("eos_token_id")
    separators = {"end_of_document": next(iter(ends), None) if isinstance(ends, list) else ends}
    try:
        write_exported(content, settings, target, tokenizer.read_bytes() if tokenizer.is_file() else None, separators)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): give a writable folder") from error
    if not tokenizer.is_file():
        notes.append(f"{folder} has no {TOKENIZER}, so the model comes without a tokenizer")
    return notes


def refuse(record: dict[str, Any], folder: Path) -> None:
    """Raise UserError with all reasons why GPT+ cannot be the model of this config.json."""
    kind = record.get("model_type")
    if kind not in KNOWN:
        raise UserError(f"{folder} holds a model of type {kind!r}: anlit import reads {', '.join(KNOWN.values())}")
    if missing := [key for key in SIZES if type(record.get(key)) is not int or record[key] < 1]:
        raise UserError(f"{folder / CONFIG} has no {', '.join(missing)}: download it again")
    heads, width = record["num_attention_heads"], record["hidden_size"]
    d_head = record.get("head_dim") or width // heads
    rope = _rope(record)
    reasons = {
        "a bias in attention": record.get("attention_bias"),
        "a bias in the MLP": record.get("mlp_bias"),
        "quantised weights": record.get("quantization_config"),
        f"the activation {record.get('hidden_act')}": record.get("hidden_act", "silu") != "silu",
        f"rotary positions of type {rope['rope_type']}": rope["rope_type"] != "default",
        "a sliding window": record.get("use_sliding_window"),
        f"heads of width {d_head} that do not fill the model's width of {width} ({heads} heads)": d_head * heads
        != width,
        "layers of experts": kind == "glm4_moe" and record["first_k_dense_replace"] < record["num_hidden_layers"],
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise UserError(
            f"GPT+ cannot be the model in {folder}, which has {', '.join(found)}: choose another checkpoint"
        )


def _rope(record: dict[str, Any]) -> dict[str, Any]:
    """Type, base and fraction of the rotary positions; transformers 4 had them under other keys."""
    rope = record.get("rope_parameters") or record.get("rope_scaling") or {}
    default = 0.5 if record["model_type"] == "glm4_moe" else 1.0
    return {
        "rope_type": rope.get("rope_type") or rope.get("type") or "default",
        "base": float(rope.get("rope_theta") or record.get("rope_theta") or 10_000.0),
        "fraction": rope.get("partial_rotary_factor", record.get("partial_rotary_factor", default)),
    }


def _model(record: dict[str, Any], context_length: int | None) -> tuple[dict[str, Any], dict[str, "Tensor"]]:
    """The settings of the GPT+, and its weights on the meta device, for their shapes."""
    import torch

    from anlit import GPT, RoPE
    from anlit.settings import as_plain

    rope = _rope(record)
    with torch.device("meta"):
        model = GPT(
            vocab_size=record["vocab_size"],
            context_length=context_length or record["max_position_embeddings"],
            n_layers=record["num_hidden_layers"],
            n_heads=record["num_attention_heads"],
            d_model=record["hidden_size"],
            d_ff=record["intermediate_size"],
            positions=RoPE(rope["fraction"], rope["base"]),
            qk_norm=record["model_type"] == "qwen3" or bool(record.get("use_qk_norm")),
            norm_eps=record.get("rms_norm_eps", 1e-6),
        )
    return as_plain(dict(model.hparams)), model.model.state_dict()


def read_weights(folder: Path) -> dict[str, "Tensor"]:
    """All tensors of model.safetensors, or of the files that its index names, in float32.

    Raises:
        UserError: A file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from anlit.checkpoints.exported import WEIGHTS

    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        names = sorted(set(_read_json(folder / INDEX, "download it again").get("weight_map", {}).values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"{folder / INDEX} names {outside[0]!r}, not a file in its folder: download it again")
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: anlit import reads safetensors, all parts of them")
        try:
            weights |= {key: tensor.float() for key, tensor in load_file(folder / name).items()}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}): download it again") from error
    return weights


def as_gpt(read: dict[str, "Tensor"], record: dict[str, Any]) -> tuple[dict[str, "Tensor"], list[str]]:
    """The weights by our names, keys and values repeated for every head, and what was changed."""
    from anlit.inference.huggingface.builtin_models import IN_BLOCK, OUTSIDE

    names = {name: ours for ours, name in OUTSIDE.items()}
    for layer in range(record["num_hidden_layers"]):
        names |= {f"model.layers.{layer}.{name}": f"blocks.{layer}.{ours}" for ours, name in IN_BLOCK.items()}
    weights = {names.get(name, name): tensor for name, tensor in read.items() if not name.endswith(".inv_freq")}
    notes = []
    if record.get("tie_word_embeddings") and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"].clone()
        notes.append("embedding and head shared one matrix: the head has a copy of it, which is trained separately")
    heads = record["num_attention_heads"]
    kv_heads = record.get("num_key_value_heads") or heads
    if kv_heads != heads:
        for name in [name for name in weights if name.endswith(("W_k.weight", "W_v.weight"))]:
            per_head = weights[name].unflatten(0, (kv_heads, -1))
            weights[name] = per_head.repeat_interleave(heads // kv_heads, 0).flatten(0, 1)
        notes.append(f"the {kv_heads} heads of keys and values are repeated to {heads}, one for each head of queries")
    return weights, notes


def _check_layers(weights: dict[str, "Tensor"], record: dict[str, Any], folder: Path) -> None:
    """Refuse a config.json whose number of layers is not that of the weights, before the model is built."""
    n_layers = len({name.split(".")[2] for name in weights if name.startswith("model.layers.")})
    if record["num_hidden_layers"] != n_layers:
        raise UserError(
            f"{folder / CONFIG} says {record['num_hidden_layers']} layers, but the weights are those of {n_layers}: "
            "download it again"
        )


def _check(weights: dict[str, "Tensor"], expected: dict[str, "Tensor"], folder: Path) -> None:
    for name in [*expected, *(name for name in weights if name not in expected)]:
        shape, wanted = (tuple(part[name].shape) if name in part else "missing" for part in (weights, expected))
        if shape != wanted:
            raise UserError(
                f"{folder} does not fit its {CONFIG} ({name} is {shape} and should be {wanted}): download it again"
            )


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({str(error).splitlines()[0]}): {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a configuration: {remedy}")
    return content

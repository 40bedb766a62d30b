"""A checkpoint of transformers as a GPT+: Qwen3, Llama, Mistral and the other families of `families.py`."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX, TOKENIZER, write_exported
from anlit.checkpoints.integrity import UNREADABLE, reason
from anlit.checkpoints.special_tokens import read_special_tokens, token_ids
from anlit.config.objects import shown, to_plain_values
from anlit.errors import UserError
from anlit.hub import families
from anlit.hub.export import new_folder
from anlit.hub.families import FACTORS, FAMILIES, MUST_BE, OPTIONAL, ROPE, SETTINGS, Family
from anlit.hub.shards import tensors_by_file
from anlit.io.read import dump_yaml, read_json
from anlit.io.write import writing
from anlit.training.load_model import rebuild

CONFIG, MODEL = "config.json", "model.yaml"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_ARGUMENTS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
"""Keys of `rope_parameters` that are no arguments of the positions' class."""


def import_model(source: str, output: str, context_length: int | None = None) -> list[str]:
    """Write the model in the folder `source` as a GPT+ into the folder `output`, in the form of `anlit export`.

    The folder also gets `model.yaml`, with which `anlit fit` makes this GPT+. Returns sentences for the user.

    `source` has config.json and model.safetensors, or its parts. `context_length` None is its max_position_embeddings.
    UserError if it is damaged or has no such model, GPT+ cannot represent it, or `output` is not empty.
    """
    folder, target = Path(source), new_folder(output)
    record = read_json(
        folder / CONFIG, families.TYPES, "give a folder that holds a model of transformers"
    )
    refuse(record, folder)
    read = read_weights(folder)
    n_layers = len({name.split(".")[2] for name in read if name.startswith("model.layers.")})
    if record["num_hidden_layers"] != n_layers:  # before a list of so many layers is made
        raise UserError(
            f"{folder / CONFIG} says {record['num_hidden_layers']} layers, but the weights are those of {n_layers}: "
            "download it again"
        )
    settings = settings_of(record) | ({"context_length": context_length} if context_length else {})
    names = families.our_names(n_layers)
    weights = {
        names.get(name, name): tensor
        for name, tensor in read.items()
        if not name.endswith(".inv_freq")
    }
    if settings["tie_embeddings"] and EMBEDDING in weights:
        if HEAD in weights and not weights[HEAD].equal(weights[EMBEDDING]):
            raise UserError(
                f"{folder / CONFIG} says tie_word_embeddings=True, but the files have a head (lm_head.weight) that is "
                "not the embedding: set tie_word_embeddings to false to take it"
            )
        weights[HEAD] = weights[EMBEDDING]
    content = {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "anlit": {
            "architecture": "GPT",
            "data": None,
            "family": record["model_type"],
            "family_length": record["max_position_embeddings"],
        },
        "global_step": 0,
    }
    try:
        with (
            torch.device("meta"),
            warnings.catch_warnings(action="ignore"),
        ):  # only the shapes are compared
            model = rebuild(content, settings, folder / CONFIG)
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"GPT+ cannot represent the model in {folder} ({reason(error)}): choose another checkpoint"
        ) from error
    tokenizer = folder / TOKENIZER
    special = read_special_tokens(folder, record)
    end_of_document = next(iter(token_ids(record.get("eos_token_id")) or special.ends), None)
    separators = {"end_of_document": end_of_document}
    with writing(target):
        special.write(target)
        stored, text = (
            to_plain_values(dict(model.hparams)),
            tokenizer.read_bytes() if tokenizer.is_file() else None,
        )
        write_exported(content, stored, target, text, separators)
        settings = {"model": {"class_path": "anlit.GPT", "init_args": settings}}
        (target / MODEL).write_text(dump_yaml(settings), encoding="utf-8")
    return (
        []
        if text is not None
        else [f"{folder} has no {TOKENIZER}, so the model comes without a tokenizer"]
    )


def refuse(record: dict[str, Any], folder: Path) -> None:
    """Raise UserError with all reasons why GPT+ cannot represent the model of this config.json."""
    family = FAMILIES.get(record.get("model_type", ""))
    if family is None:
        names = ", ".join(known.name for known in FAMILIES.values())
        raise UserError(
            f"{folder / CONFIG} has model_type={shown(record.get('model_type'))}, an architecture that GPT+ does not "
            f"include: choose a checkpoint of {names}"
        )
    if missing := [key for key in SETTINGS if key not in OPTIONAL and (record.get(key) or 0) < 1]:
        raise UserError(f"{folder / CONFIG} has no {', '.join(missing)}: download it again")
    values = [(key, record.get(key, only), only, why) for key, (only, why) in MUST_BE.items()]
    reasons = [f"{key}={shown(value)} ({why})" for key, value, only, why in values if value != only]
    rope = _rope(record, family)
    if rope["rope_type"] not in ROPE:
        reasons.append(f"rope_type={shown(rope['rope_type'])} (GPT+ has {', '.join(ROPE)})")
    elif strange := rope.keys() - {*ROPE[rope["rope_type"]][1]} - NO_ARGUMENTS:
        reasons.append(
            f"rope_parameters.{min(strange)} (the positions of GPT+ have no such setting)"
        )
    elif absent := FACTORS.intersection(ROPE[rope["rope_type"]][1]) - rope.keys():
        reasons.append(f"no rope_parameters.{min(absent)} (nothing is assumed in its place)")
    if (share := rope["partial_rotary_factor"]) != 1:
        reasons.append(f"partial_rotary_factor={shown(share)} ({family.architecture} ignores it)")
    if reasons:
        raise UserError(
            f"GPT+ cannot represent the model in {folder}, whose {CONFIG} has {', '.join(reasons)}: choose another "
            "checkpoint"
        )


def settings_of(record: dict[str, Any]) -> dict[str, Any]:
    """The settings of the GPT+ as plain values."""
    family = FAMILIES[record["model_type"]]
    defaults = OPTIONAL | family.defaults
    settings = {ours: record.get(theirs, defaults.get(theirs)) for theirs, ours in SETTINGS.items()}
    rope = _rope(record, family)
    name, keys = ROPE[rope["rope_type"]]
    if families.ORIGINAL_LENGTH in keys:
        rope.setdefault(families.ORIGINAL_LENGTH, record["max_position_embeddings"])
    arguments = {
        families.OUR_NAMES.get(key, key): value
        for key, value in rope.items()
        if key not in NO_ARGUMENTS
    }
    rotary = _part(name, **arguments, fraction=1.0, base=rope["rope_theta"])
    positions = [rotary if turns else _part("NoPE") for turns in _turns(record, family)]
    widths = _windows(record, family)
    windows = [
        _part("Plain") if width is None else _part("SlidingWindow", width=width) for width in widths
    ]
    return settings | {
        "qk_norm": family.qk_norm,
        "positions": _in_turn(positions, "PositionsPattern"),
        "attention": _in_turn(windows, "AttentionPattern"),
    }


def _part(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"anlit.{name}", **({"init_args": arguments} if arguments else {})}


def _rope(record: dict[str, Any], family: Family) -> dict[str, Any]:
    """The keys of the rotary positions that have a value; transformers 4 had them elsewhere."""
    read = record.get("rope_parameters") or record.get("rope_scaling") or {}
    rope = {key: value for key, value in read.items() if value is not None}
    rope["rope_type"] = str(rope.get("rope_type") or rope.get("type") or "default")
    for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 1.0)):
        rope.setdefault(key, record.get(key) or family.defaults.get(key, default))
    return rope


def _turns(record: dict[str, Any], family: Family) -> list[bool]:
    """Whether each layer has rotary positions."""
    n_layers, interval = record["num_hidden_layers"], record.get("no_rope_layer_interval") or 4
    if not family.nope:
        return [True]
    named = record.get("no_rope_layers") or [(layer + 1) % interval for layer in range(n_layers)]
    return [bool(turns) for turns in named[:n_layers]]


def _windows(record: dict[str, Any], family: Family) -> list[int | None]:
    width, n_layers = (
        record.get("sliding_window", family.defaults.get("sliding_window")),
        record["num_hidden_layers"],
    )
    if family.windows == "in all":
        return [width]
    if family.windows == "nowhere" or not record.get("use_sliding_window"):
        return [None]
    if kinds := record.get("layer_types"):
        return [width if kind == "sliding_attention" else None for kind in kinds[:n_layers]]
    if family.nope:
        return [None if turns else width for turns in _turns(record, family)]
    first = 28 if record.get("max_window_layers") is None else record["max_window_layers"]
    return [width if layer >= first else None for layer in range(n_layers)]


def _in_turn(layers: list[dict[str, Any]], pattern: str) -> dict[str, Any]:
    """The part of all layers, or the pattern that gives it to them in turn."""
    periods = range(1, len(layers) + 1)
    period = next(n for n in periods if all(part == layers[i % n] for i, part in enumerate(layers)))
    return layers[0] if period == 1 else _part(pattern, layers=layers[:period])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model in float32; UserError as in `tensors_by_file`, and for numbers that are no weights."""
    weights: dict[str, Tensor] = {}
    for file, names in tensors_by_file(folder).items():
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in names}
        if quantised := [
            f"{key} of {tensor.dtype}"
            for key, tensor in tensors.items()
            if tensor.dtype not in FLOATS
        ]:
            raise UserError(
                f"{file} has {quantised[0]}, and GPT+ no quantised weights: choose others"
            )
        weights |= {key: tensor.float() for key, tensor in tensors.items()}
    return weights

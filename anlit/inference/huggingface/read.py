"""A checkpoint of transformers as a GPT+: Qwen3, Llama, Mistral and the other families of `families.py`."""

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from anlit import GPT
from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX, TOKENIZER, write_exported
from anlit.checkpoints.location import WEIGHTS
from anlit.errors import UserError
from anlit.inference.export import new_folder
from anlit.inference.huggingface import families
from anlit.inference.huggingface.families import FAMILIES, MUST_BE, OPTIONAL, ORIGINAL_LENGTH, ROPE, SETTINGS, Family
from anlit.reading import read_json
from anlit.settings import build_from_plain, shown, to_plain_values

CONFIG, INDEX, MODEL = "config.json", "model.safetensors.index.json", "model.yaml"
NOT_OF_THE_SHAPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
"""Keys of `rope_parameters` that every type may have."""


def import_model(source: str, output: str, context_length: int | None = None) -> list[str]:
    """Write the model in the folder `source` as a GPT+ into the folder `output`, in the form of `anlit export`.

    The folder also gets `model.yaml`, with which `anlit fit` makes this GPT+.

    `source` has config.json and model.safetensors, or its parts and their index. `context_length` None is its
    max_position_embeddings.

    Returns:
        Sentences on what the user should know.

    Raises:
        UserError: The folder is damaged or has no such model, GPT+ cannot be that model, or `output` is not empty.
    """
    folder, target = Path(source), new_folder(output)
    record = read_json(folder / CONFIG, families.TYPES, "give a folder that holds a model of transformers")
    refuse(record, folder)
    read = read_weights(folder)
    n_layers = len({name.split(".")[2] for name in read if name.startswith("model.layers.")})
    if record["num_hidden_layers"] != n_layers:  # before a model of so many layers is built
        raise UserError(
            f"{folder / CONFIG} says {record['num_hidden_layers']} layers, but the weights are those of {n_layers}: "
            "download it again"
        )
    settings = settings_of(record, folder) | ({"context_length": context_length} if context_length else {})
    names = families.our_names(record["num_hidden_layers"])
    weights = {names.get(name, name): tensor for name, tensor in read.items() if not name.endswith(".inv_freq")}
    if settings["tie_embeddings"] and EMBEDDING in weights:
        _refuse_other_head(weights, folder)
        weights[HEAD] = weights[EMBEDDING]
    stored, shapes = _model(settings, folder)
    _check(weights, shapes, folder)
    content = {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "anlit": {"architecture": "GPT", "data": None, "family": record["model_type"]},
        "global_step": 0,
    }
    tokenizer = folder / TOKENIZER
    ends = record.get("eos_token_id")
    separators = {"end_of_document": next(iter(ends), None) if isinstance(ends, list) else ends}
    try:
        write_exported(content, stored, target, tokenizer.read_bytes() if tokenizer.is_file() else None, separators)
        model = {"model": {"class_path": "anlit.GPT", "init_args": settings}}
        (target / MODEL).write_text(yaml.safe_dump(model, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written ({error.strerror}): give a writable folder") from error
    return [] if tokenizer.is_file() else [f"{folder} has no {TOKENIZER}, so the model comes without a tokenizer"]


def refuse(record: dict[str, Any], folder: Path) -> None:
    """Raise UserError with all reasons why GPT+ cannot be the model of this config.json."""
    kind = record.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        names = ", ".join(known.name for known in FAMILIES.values())
        why = f" ({families.UNFIT[kind]})" if isinstance(kind, str) and kind in families.UNFIT else ""
        raise UserError(
            f"{folder / CONFIG} has model_type={shown(kind)}, which GPT+ cannot be{why}: choose a checkpoint of {names}"
        )
    if missing := [key for key in SETTINGS if key not in OPTIONAL and (record.get(key) or 0) < 1]:
        raise UserError(f"{folder / CONFIG} has no {', '.join(missing)}: download it again")
    for key in ("sliding_window", "no_rope_layer_interval"):
        if record.get(key) is not None and record[key] < 1:
            raise UserError(f"{folder / CONFIG} has {key}={record[key]}: download it again")
    values = [(key, record.get(key, only), only, why) for key, (only, why) in MUST_BE.items()]
    reasons = [f"{key}={shown(value)} ({why})" for key, value, only, why in values if value != only]
    rope = _rope(record, family)
    if rope["rope_type"] not in ROPE:
        reasons.append(f"rope_type={shown(rope['rope_type'])} (GPT+ has {', '.join(ROPE)})")
    elif strange := rope.keys() - {*ROPE[rope["rope_type"]][1]} - NOT_OF_THE_SHAPE:
        reasons.append(f"rope_parameters.{min(strange)} (the positions of GPT+ have no such setting)")
    if (share := rope["partial_rotary_factor"]) != 1:
        reasons.append(f"partial_rotary_factor={shown(share)} ({family.architecture} ignores it)")
    if reasons:
        raise UserError(
            f"GPT+ cannot be the model in {folder}, whose {CONFIG} has {', '.join(reasons)}: choose another checkpoint"
        )


def settings_of(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of the GPT+ as plain values.

    Raises:
        UserError: The rotary positions lack a number.
    """
    family = FAMILIES[record["model_type"]]
    defaults = OPTIONAL | family.defaults
    settings = {ours: record.get(theirs, defaults.get(theirs)) for theirs, ours in SETTINGS.items()}
    settings["qk_norm"] = family.qk_norm
    rope = _rope(record, family)
    name, keys = ROPE[rope["rope_type"]]
    if ORIGINAL_LENGTH in keys:
        rope.setdefault(ORIGINAL_LENGTH, record["max_position_embeddings"])
    if missing := [key for key in keys if key not in rope and key in ("factor", "low_freq_factor", "high_freq_factor")]:
        raise UserError(f"{folder / CONFIG} has no rope_parameters.{missing[0]}: download it again")
    arguments = {"fraction": 1.0, "base": rope["rope_theta"]}
    arguments |= {families.our_setting(key): rope[key] for key in keys if key in rope}
    turning = {"class_path": f"anlit.{name}", "init_args": arguments}
    positions = [turning if turns else {"class_path": "anlit.NoPE"} for turns in _turns(record, family)]
    windows = [{"class_path": "anlit.SlidingWindow", "init_args": {"width": width}} if width else
               {"class_path": "anlit.Plain"} for width in _windows(record, family)]  # fmt: skip
    patterns = {
        "positions": _in_turn(positions, "PositionsPattern"),
        "attention": _in_turn(windows, "AttentionPattern"),
    }
    return settings | patterns


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
    """The window of each layer."""
    width, n_layers = record.get("sliding_window", family.defaults.get("sliding_window")), record["num_hidden_layers"]
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
    if period == 1:
        return layers[0]
    return {"class_path": f"anlit.{pattern}", "init_args": {"layers": layers[:period]}}


def _model(settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """All settings of the GPT+, and its weights on the meta device, for their shapes."""
    try:
        with torch.device("meta"):
            model = build_from_plain(GPT, settings, f"{folder / CONFIG}: model")
    except (ValueError, RuntimeError, OverflowError, TypeError) as error:  # the last three for sizes that nothing has
        reason = str(error).splitlines()[0]
        raise UserError(f"GPT+ cannot be the model in {folder} ({reason}): choose another checkpoint") from error
    return to_plain_values(dict(model.hparams)), model.model.state_dict()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the files that its index names, in float32.

    Raises:
        UserError: A file is missing or damaged, or has numbers that are no weights.
    """
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        named = read_json(folder / INDEX, {}, "download it again").get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise UserError(f"{folder / INDEX} has no weight_map with a file for each tensor: download it again")
        names = sorted(set(named.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"{folder / INDEX} names {outside[0]!r}, not a file in its folder: download it again")
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: anlit import reads safetensors, all parts of them")
        try:
            tensors = load_file(folder / name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}): download it again") from error
        if quantised := [f"{key} of {tensor.dtype}" for key, tensor in tensors.items() if tensor.dtype not in floats]:
            raise UserError(f"{folder / name} has {quantised[0]}, and GPT+ no quantised weights: choose others")
        weights |= {key: tensor.float() for key, tensor in tensors.items()}
    return weights


def _refuse_other_head(weights: dict[str, Tensor], folder: Path) -> None:
    """Refuse files with a head of their own where config.json says that it is the embedding."""
    if HEAD in weights and not weights[HEAD].equal(weights[EMBEDDING]):
        raise UserError(
            f"{folder / CONFIG} says tie_word_embeddings=True, but the files have a head (lm_head.weight) that is not "
            "the embedding: set tie_word_embeddings to false to take it"
        )


def _check(weights: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    for name in [*expected, *(name for name in weights if name not in expected)]:
        shape, wanted = (tuple(part[name].shape) if name in part else "missing" for part in (weights, expected))
        if shape != wanted:
            raise UserError(
                f"{folder} does not fit its {CONFIG} ({name} is {shape} and should be {wanted}): download it again"
            )

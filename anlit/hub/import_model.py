"""A checkpoint of transformers as a GPT+: Qwen3, Llama, Mistral and the other `families`."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX, TOKENIZER, write_exported
from anlit.checkpoints.integrity import UNREADABLE, reason
from anlit.checkpoints.location import MAX_SHARD_SIZE
from anlit.checkpoints.special_tokens import SpecialTokens, read_special_tokens, token_ids
from anlit.checkpoints.weight_files import WeightFormat, read_weights
from anlit.config.objects import shown, to_plain_values
from anlit.errors import UserError
from anlit.hub.config_json import CONFIG_JSON, check_config, gpt_settings, unknown_keys
from anlit.hub.export import check_new_folder
from anlit.hub.families import TYPES, weight_names
from anlit.io.read import read_json
from anlit.io.write import write_text, writing_new
from anlit.io.yaml_text import dump_yaml
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import rebuild

MODEL_YAML = "model.yaml"
ADVICE = "download the model again"
"""What a user does about damaged weights."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Number formats of weights that can be read."""


def import_model(
    source: str,
    output: str,
    context_length: int | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> list[str]:
    """Write the model in the folder `source` as a GPT+ into the folder `output`.

    `output` gets the form of `anlit export`, and `model.yaml`, with which `anlit fit` makes this
    GPT+. The weights are read and written shard by shard.

    Args:
        source: A folder with config.json and model.safetensors, or its shards.
        output: A new or empty folder.
        context_length: None: max_position_embeddings of config.json.
        max_shard_size: The size of a file of weights in `output`, such as 500MB or 50GB.

    Returns:
        Sentences for the user.

    Raises:
        UserError: `source` is damaged or has no such model. GPT+ cannot represent it. `output` is
            not empty.
    """
    folder = Path(source)
    target = check_new_folder(output)
    config = read_json(
        folder / CONFIG_JSON, TYPES, "give a folder that holds a model of transformers"
    )
    check_config(config, folder)
    tensors = read_weights(folder, ADVICE)
    _refuse_quantised(tensors, folder)
    n_layers = _check_n_layers(tensors, config, folder)
    settings = gpt_settings(config)
    if context_length:
        settings["context_length"] = context_length
    weights = _rename_weights(tensors, n_layers)
    if settings["tie_embeddings"] and EMBEDDING in weights:
        _tie_head(weights, folder)
    content = {
        "state_dict": {PREFIX + name: tensor for name, tensor in weights.items()},
        "anlit": {
            "architecture": "GPT",
            "data": None,
            "family": config["model_type"],
            "family_length": config["max_position_embeddings"],
        },
        "global_step": 0,
    }
    model = _build_model(content, settings, folder)
    special = read_special_tokens(folder, config)
    tokenizer = folder / TOKENIZER
    tokenizer_json = tokenizer.read_bytes() if tokenizer.is_file() else None
    model_yaml = dump_yaml({"model": {"class_path": "anlit.GPT", "init_args": settings}})
    with writing_new(target):
        special.write(target)
        plain_settings = to_plain_values(dict(model.hparams))
        separator = {"end_of_document": _end_of_document(config, special)}
        write_text(target / MODEL_YAML, model_yaml)
        weight_format = WeightFormat(torch.float32, max_shard_size)
        write_exported(content, plain_settings, target, tokenizer_json, separator, weight_format)
    notes = []
    if tokenizer_json is None:
        notes.append(f"{folder} has no {TOKENIZER}, so the model comes without a tokenizer")
    keys = unknown_keys(config)
    if keys:
        notes.append(
            f"{folder / CONFIG_JSON} has {', '.join(map(shown, keys))}, which anlit does not read: "
            "compare the model's logits with transformers'"
        )
    return notes


def _refuse_quantised(tensors: dict[str, Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"{folder} has {name} of {tensor.dtype}, and GPT+ no quantised weights: "
                "choose others"
            )


def _check_n_layers(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> int:
    """Count the layers of the weights; UserError if config.json has another number.

    Without the check, a wrong number could make a list of billions of layers.
    """
    layer_tensors = [name for name in tensors if name.startswith("model.layers.")]
    n_layers = len({name.split(".")[2] for name in layer_tensors})
    if config["num_hidden_layers"] != n_layers:
        raise UserError(
            f"{folder / CONFIG_JSON} says {config['num_hidden_layers']} layers, but the weights "
            f"have {n_layers}: download it again"
        )
    return n_layers


def _rename_weights(tensors: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """The weights by GPT+'s names; unknown names stay, and `rebuild` reports them."""
    names = weight_names(n_layers)
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(".inv_freq"):
            weights[names.get(name, name)] = tensor
    return weights


def _tie_head(weights: dict[str, Tensor], folder: Path) -> None:
    """Make the embedding the head; UserError if the files have another head."""
    if HEAD in weights and not weights[HEAD].float().equal(weights[EMBEDDING].float()):
        raise UserError(
            f"{folder / CONFIG_JSON} says tie_word_embeddings=True, but the files have a head "
            "(lm_head.weight) that is not the embedding: set tie_word_embeddings to false to "
            "take it"
        )
    weights[HEAD] = weights[EMBEDDING]


def _build_model(content: dict[str, Any], settings: dict[str, Any], folder: Path) -> LanguageModel:
    """Build the GPT+ without memory for its weights, which checks their names and shapes."""
    weights = {name: tensor.to("meta") for name, tensor in content["state_dict"].items()}
    content = {**content, "state_dict": weights}
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            return rebuild(content, settings, folder / CONFIG_JSON)
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(
            f"GPT+ cannot represent the model in {folder} ({reason(error)}): "
            "choose another checkpoint"
        ) from error


def _end_of_document(config: dict[str, Any], special: SpecialTokens) -> int | None:
    """The first end token of config.json, else of the other files."""
    end_tokens = token_ids(config.get("eos_token_id")) or special.eos_tokens
    return next(iter(end_tokens), None)

"""A checkpoint's model in a folder of its own, for anlit or for transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.checkpoints.exported import EMBEDDING, HEAD, write_exported, write_folder
from anlit.checkpoints.location import MAX_SHARD_SIZE
from anlit.checkpoints.special_tokens import GENERATION_CONFIG, TOKENIZER_CONFIG, SpecialTokens
from anlit.checkpoints.weight_files import FLOAT32, WeightFormat
from anlit.data.tokenizer import vocabulary_size
from anlit.errors import UserError
from anlit.evaluation.tokenizer import (
    CheckpointTokenizer,
    MissingTokenizerError,
    load_checkpoint_tokenizer,
)
from anlit.hub import builtin_models, custom_code, families
from anlit.hub.translated_settings import refuse_dropped_settings
from anlit.io.write import write_bytes, write_json, writing_new
from anlit.training.load_model import Checkpoint, load_checkpoint


def export_model(
    checkpoint: str,
    output: str,
    form: str,
    tokenizer: str | None,
    dtype: str,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Path:
    """Write the model of `checkpoint` into the folder `output`; returns the folder.

    Args:
        checkpoint: A run folder, a .ckpt file or an exported folder.
        output: A new or empty folder.
        form: `safetensors` for anlit itself, `huggingface` for transformers.
        tokenizer: The tokenizer.json to add. None: the tokenizer of the model's data, if any.
        dtype: The precision of the weights: float32, bfloat16 or float16.
        max_shard_size: The size of a file of weights, such as 500MB or 50GB.

    Raises:
        UserError: The checkpoint is missing, damaged or foreign. The model has no form for
            transformers. The tokenizer belongs to another model. `output` is not empty, or cannot
            be written.
    """
    folder = check_new_folder(output)
    loaded = load_checkpoint(checkpoint, "cpu")  # checks that the weights fit
    try:
        model_tokenizer = load_checkpoint_tokenizer(loaded, tokenizer)
    except MissingTokenizerError:
        model_tokenizer = None
    weight_format = WeightFormat(getattr(torch, dtype), max_shard_size)
    with writing_new(folder):
        if form == "huggingface":
            write_huggingface(loaded, folder, model_tokenizer, weight_format)
        else:
            _write_safetensors(loaded, folder, model_tokenizer, weight_format)
    return folder


def check_new_folder(output: str) -> Path:
    """The path of `output`; UserError if it is not an empty folder. It is not created here."""
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {output} is not an empty folder: choose a new name")
    return folder


def _write_safetensors(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: CheckpointTokenizer | None,
    weight_format: WeightFormat,
) -> None:
    content = {
        "state_dict": checkpoint.model.state_dict(),
        "anlit": {
            "architecture": checkpoint.architecture,
            "data": checkpoint.trained_on,
            "family": checkpoint.family,
            "family_length": checkpoint.family_length,
        },
        "global_step": checkpoint.step,
    }
    separator: dict[str, Any] = {}
    tokenizer_json = None
    if tokenizer:
        separator["end_of_document"] = tokenizer.separator.token
        separator["document_token_at"] = tokenizer.separator.at
        tokenizer_json = tokenizer.content
        tokenizer.special_tokens.write(folder)
    write_exported(content, checkpoint.settings, folder, tokenizer_json, separator, weight_format)


def write_huggingface(
    checkpoint: Checkpoint,
    folder: Path,
    tokenizer: CheckpointTokenizer | None,
    weight_format: WeightFormat = FLOAT32,
) -> None:
    """Write `folder` so that `AutoModelForCausalLM.from_pretrained(folder)` gives the model.

    GPT+ is written in an exactly equal architecture of transformers. An imported model keeps its
    original architecture if possible. nGPT and anGPT (folded), and GPT+ with other settings, come
    with custom code. from_pretrained runs it with `trust_remote_code=True`.

    `fit` rounds the vocabulary up by tokens without a text. They are left out.

    Raises:
        UserError: The folder could not hold a setting of the model.
    """
    refuse_dropped_settings(checkpoint.model)
    decoder = checkpoint.model.model
    length = checkpoint.longest_context
    model_type = None
    if checkpoint.architecture == "GPT":
        model_type = builtin_models.find_model_type(checkpoint.model, checkpoint.family)
    if model_type is not None:
        config = builtin_models.config_json(decoder, length, model_type)
        weights = builtin_models.renamed_weights(decoder)
    else:
        config, weights = custom_code.export(checkpoint)
    cut_vocabulary(config, weights, count_tokens(checkpoint, tokenizer))
    token_ids = _special_token_ids(tokenizer)
    dtype = str(weight_format.dtype).removeprefix("torch.")
    config = {**config, **token_ids, "dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    if model_type is None:
        for file in custom_code.CODE_FILES:
            write_bytes(folder / file.name, file.read_bytes())
    special = tokenizer.special_tokens if tokenizer else SpecialTokens()
    generation_config = {"do_sample": False, **special.generation_config, **token_ids}
    write_json(folder / GENERATION_CONFIG, generation_config)
    tokenizer_json = None
    if tokenizer:
        tokenizer_json = tokenizer.content
        tokenizer_config = _tokenizer_config(tokenizer, token_ids["pad_token_id"], length)
        write_json(folder / TOKENIZER_CONFIG, tokenizer_config)
    write_folder(folder, weights, config, tokenizer_json, weight_format)


def _tokenizer_config(
    tokenizer: CheckpointTokenizer, pad_token_id: int | None, length: int
) -> dict[str, Any]:
    """tokenizer_config.json; the values of an imported model come first."""
    end = None if pad_token_id is None else tokenizer.tokenizer.id_to_token(pad_token_id)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # decoders need this to generate
        "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids
        **tokenizer.special_tokens.tokenizer_config,
    }


def count_tokens(checkpoint: Checkpoint, tokenizer: CheckpointTokenizer | None) -> int:
    """Count the tokens that have a text; an imported model keeps its whole vocabulary."""
    n_rows = checkpoint.model.vocab_size
    if checkpoint.family is not None:
        return n_rows
    if tokenizer is None:
        return min(n_rows, (checkpoint.trained_on or {}).get("vocab_size") or n_rows)
    return max(vocabulary_size(tokenizer.tokenizer), 1 + max(tokenizer.stop_tokens, default=0))


def cut_vocabulary(config: dict[str, Any], weights: dict[str, Tensor], n_tokens: int) -> None:
    """Keep only the first `n_tokens` rows of the embedding and the head."""
    config["vocab_size"] = n_tokens
    for hub_name, name in families.WEIGHTS.items():
        if name not in (EMBEDDING, HEAD):
            continue
        for key in (name, hub_name):
            if key in weights:
                weights[key] = weights[key][:n_tokens]


def _special_token_ids(tokenizer: CheckpointTokenizer | None) -> dict[str, Any]:
    """The ids for config.json and generation_config.json; several end tokens are a list."""
    stop_tokens = tokenizer.stop_tokens if tokenizer else ()
    special = tokenizer.special_tokens if tokenizer else SpecialTokens()
    first_stop_token = stop_tokens[0] if stop_tokens else None
    return {
        "bos_token_id": special.bos_token,
        "eos_token_id": list(stop_tokens) if len(stop_tokens) > 1 else first_stop_token,
        "pad_token_id": special.generation_config.get("pad_token_id", first_stop_token),
    }

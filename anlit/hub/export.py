"""A checkpoint's model in a folder of its own, for anlit or for transformers."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.checkpoints.exported import EMBEDDING, HEAD, PREFIX, write_exported, write_folder
from anlit.checkpoints.special_tokens import GENERATION_CONFIG, TOKENIZER_CONFIG, SpecialTokens
from anlit.data.tokenizer import vocabulary_size
from anlit.errors import UserError
from anlit.evaluation.text import CheckpointTokenizer, MissingTokenizerError, text_of
from anlit.hub import builtin_models, custom_code, families
from anlit.io.write import write_json, writing
from anlit.nn.models.fold import fold
from anlit.training.load_model import Checkpoint, load_checkpoint
from anlit.training.models import FOLDED


def export_model(
    checkpoint: str,
    output: str,
    form: str = "safetensors",
    folded: bool = False,
    tokenizer: str | None = None,
    dtype: str = "float32",
) -> Path:
    """Write the model of `checkpoint` into the folder `output`; returns the folder.

    Args:
        form: `safetensors` for anlit itself, `huggingface` for transformers.
        folded: Store the factors of nGPT and anGPT in their matrices, as `huggingface` always does.
        tokenizer: The tokenizer.json to add; by default that of the model's data, if the data is still there.
        dtype: The precision of the weights: float32, bfloat16 or float16.

    Raises:
        UserError: The checkpoint is missing, damaged or foreign, the model has no factors to fold or no form for
            transformers, the tokenizer is another model's, or `output` is not empty or cannot be written.
    """
    folder = new_folder(output)
    loaded = load_checkpoint(checkpoint, "cpu")  # checks that the weights fit
    try:
        text = text_of(loaded, tokenizer)
    except MissingTokenizerError:
        text = None
    with writing(folder):
        if form == "huggingface":
            write_huggingface(loaded, folder, text, dtype)
        else:
            _write_safetensors(loaded, folder, text, folded, dtype)
    return folder


def new_folder(output: str) -> Path:
    """The path of the folder `output`, which is not created here; UserError if it is not an empty folder."""
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output {output} is not an empty folder: choose a new name")
    return folder


def _write_safetensors(
    loaded: Checkpoint, folder: Path, text: CheckpointTokenizer | None, folded: bool, dtype: str
) -> None:
    content = read_checkpoint(loaded.file)
    if folded:
        weights = fold(loaded.model.model).state_dict()
        content["state_dict"] = {PREFIX + name: tensor for name, tensor in weights.items()}
        content["anlit"] = content["anlit"] | {"architecture": FOLDED[loaded.architecture].__name__}
    separators = (
        {"end_of_document": text.ending.token, "document_token_at": text.ending.at} if text else {}
    )
    if text:
        text.special.write(folder)
    write_exported(
        content,
        loaded.settings,
        folder,
        text.content if text else None,
        separators,
        getattr(torch, dtype),
    )


def write_huggingface(
    checkpoint: Checkpoint, folder: Path, text: CheckpointTokenizer | None, dtype: str = "float32"
) -> None:
    """Write `folder` so that `AutoModelForCausalLM.from_pretrained(folder)` gives the model.

    GPT+ is written in an architecture of transformers that is exactly the same, first that which it was imported from.
    nGPT and anGPT (folded), and GPT+ with other settings, come with custom code, which from_pretrained runs with
    `trust_remote_code=True`. UserError if the code does not support one of the model's settings.

    The tokens with which `fit` rounds the vocabulary up have no text, so they are left out.
    """
    decoder, length = checkpoint.model.model, checkpoint.longest_context
    family = (
        builtin_models.family_of(decoder, checkpoint.family)
        if checkpoint.architecture == "GPT"
        else None
    )
    if family is not None:
        record, weights = (
            builtin_models.configuration(decoder, length, family),
            builtin_models.weights(decoder),
        )
    else:
        record, weights = custom_code.exported(checkpoint)
    cut_vocabulary(record, weights, number_of_tokens(checkpoint, text))
    special = _special_ids(text)
    write_folder(
        folder,
        weights,
        {**record, **special, "dtype": dtype},
        text.content if text else None,
        getattr(torch, dtype),
    )
    if family is None:
        for file in custom_code.CODE:
            shutil.copyfile(file, folder / file.name)
    kept = text.special if text else SpecialTokens()
    generation = {"do_sample": False, **kept.generation_config, **special}
    write_json(folder / GENERATION_CONFIG, generation)
    if text:
        end = special["pad_token_id"]
        name = text.tokenizer.id_to_token(end) if end is not None else None
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": name,
            "pad_token": name,
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            "padding_side": "left",  # decoders need this to generate
            "model_input_names": ["input_ids", "attention_mask"],  # no token_type_ids
            **kept.tokenizer_config,
        }
        write_json(folder / TOKENIZER_CONFIG, settings)


def number_of_tokens(checkpoint: Checkpoint, text: CheckpointTokenizer | None) -> int:
    """How many tokens have a text, as far as it is known; an imported model keeps its whole vocabulary."""
    n_rows = checkpoint.model.vocab_size
    if checkpoint.family is not None:
        return n_rows
    if text is None:
        return min(n_rows, (checkpoint.trained_on or {}).get("vocab_size") or n_rows)
    return max(vocabulary_size(text.tokenizer), 1 + max(text.ends, default=0))


def cut_vocabulary(record: dict[str, Any], weights: dict[str, Tensor], n_tokens: int) -> None:
    """Leave only the first `n_tokens` rows in the embedding and the head."""
    record["vocab_size"] = n_tokens
    theirs = {name: key for key, name in families.WEIGHTS.items()}
    for ours in (EMBEDDING, HEAD):
        for name in (ours, theirs[ours]):
            if name in weights:
                weights[name] = weights[name][:n_tokens]


def _special_ids(text: CheckpointTokenizer | None) -> dict[str, Any]:
    """The ids of special tokens for config.json and generation_config.json; several ends are a list."""
    ends = text.ends if text else ()
    kept = text.special if text else SpecialTokens()
    return {
        "bos_token_id": kept.begin,
        "eos_token_id": [*ends] if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": kept.generation_config.get("pad_token_id", next(iter(ends), None)),
    }

"""Writes a model's folder for transformers: weights, configuration, tokenizer and, if needed, custom code."""

import shutil
from pathlib import Path
from typing import Any

from anlit.checkpoints.exported import write_folder
from anlit.checkpoints.loading import Checkpoint
from anlit.inference.huggingface import builtin_models, custom_code
from anlit.inference.text import CheckpointTokenizer
from anlit.reporting.files import write_json


def write_huggingface(checkpoint: Checkpoint, folder: Path, text: CheckpointTokenizer | None) -> None:
    """Write `folder` so that `AutoModelForCausalLM.from_pretrained(folder)` gives the model.

    GPT+ is written in an architecture of transformers that is exactly the same, first that which it was imported from.
    nGPT and anGPT (folded), and GPT+ with other settings, come with custom code, which from_pretrained runs with
    `trust_remote_code=True`.

    Raises:
        UserError: The code does not support one of the model's settings.
    """
    decoder = checkpoint.model.model
    family = builtin_models.family_of(decoder, checkpoint.family) if checkpoint.architecture == "GPT" else None
    if family is not None:
        record = builtin_models.configuration(decoder, checkpoint.training_length, family)
        weights = builtin_models.weights(decoder)
    else:
        record, weights = custom_code.exported(checkpoint)
    end = text.end_of_document if text is not None else None
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    write_folder(folder, weights, {**record, **special, "dtype": "float32"}, text.content if text is not None else None)
    if family is None:
        shutil.copyfile(custom_code.CODE, folder / custom_code.CODE.name)
    write_json(folder / "generation_config.json", {**special, "do_sample": False})
    if text is not None:
        name = text.tokenizer.id_to_token(end) if end is not None else None
        write_json(folder / "tokenizer_config.json", _tokenizer_settings(name, checkpoint.training_length))


def _tokenizer_settings(end: str | None, context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # decoders need this to generate
    }

"""The data that a checkpoint is evaluated on."""

import inspect
from importlib import import_module
from typing import Any

from anlit.checkpoints.loading import Checkpoint
from anlit.configuration import mapping
from anlit.data.module import TokenShards
from anlit.errors import UserError

# What these settings say is how the run was trained and watched, not what its validation split is.
OF_TRAINING = ("context_length", "context_schedule", "num_workers", "weights", "val_context_length", "val_blocks")


def data_of(checkpoint: Checkpoint, path: str | None = None) -> TokenShards:
    """The data of the checkpoint's run, or of the prepared folder `path` with the run's way of scoring.

    Its `context_length` is the model's and `val_tokens` the run's; change them before `setup("validate")`.

    Raises:
        UserError: The run is not known and no path is given, the folder is missing or damaged, or its tokenizer is
            not the one that the model was trained with.
    """
    section = mapping((checkpoint.config or {}).get("data"))
    settings = {key: value for key, value in mapping(section.get("init_args")).items() if key not in OF_TRAINING}
    if path is not None:
        known = inspect.signature(TokenShards).parameters
        data = TokenShards(**{**{key: value for key, value in settings.items() if key in known}, "path": path})
    elif "class_path" in section:
        data = _class(section["class_path"], checkpoint)(**settings)
    else:
        raise UserError(f"{checkpoint.file} does not lie in a run folder that tells its data: set --data to a folder")
    data.context_length = checkpoint.training_length
    _check(checkpoint, data)
    return data


def available_targets(data: TokenShards) -> int:
    """Targets in the validation split."""
    data.val_tokens = data.val_blocks = None
    data.setup("validate")
    return data.val_dataloader().stream.n_targets


def spread(data: TokenShards, piece: int, tokens: int, batch_tokens: int) -> None:
    """Let the data validate on pieces of `piece` targets, evenly spread over the split.

    Args:
        piece: No longer than the split.
        tokens: In all, a multiple of `piece`; all whole pieces where there are fewer.
        batch_tokens: In a batch, one piece at least.
    """
    data.val_tokens = available_targets(data) // piece * piece
    data.val_blocks = tokens // piece if tokens < data.val_tokens else None
    data.val_context_length = piece
    data.val_batch_size = max(1, batch_tokens // piece)
    data.setup("validate")


def _class(class_path: str, checkpoint: Checkpoint) -> Any:
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(import_module(module or "anlit.data"), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"The data class {class_path} of {checkpoint.file} is not installed: set --data to a prepared folder"
        ) from error


def _check(checkpoint: Checkpoint, data: TokenShards) -> None:
    """Refuse a missing folder and tokens that are not the model's; the data's own sentences name `fit`'s setting."""
    try:
        manifest = data.manifest
    except UserError as error:
        raise UserError(str(error).replace("--data.path", "--data")) from error
    then, now = checkpoint.trained_on, manifest["tokenizer_sha256"]
    if then is not None and then["tokenizer_sha256"] != now:
        raise UserError(
            f"{checkpoint.file} was trained with another tokenizer ({_short(then['tokenizer_sha256'])}) than the "
            f"shards in {data.path} have ({_short(now)}): set --data to shards of that tokenizer"
        )
    if checkpoint.model.vocab_size < data.vocab_size:  # unknown training data: at least every token must have a row
        raise UserError(
            f"{checkpoint.file} has a vocabulary of {checkpoint.model.vocab_size} tokens and the shards in {data.path} "
            f"have {data.vocab_size}: set --data to shards of the model's tokenizer"
        )


def _short(sha256: str | None) -> str:
    return f"{sha256[:12]}…" if sha256 else "none"

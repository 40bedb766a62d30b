"""The validation data of a checkpoint's run, or of another prepared folder."""

import inspect
from typing import Any

# A configuration may name any class of these modules. Classes that are not imported are refused.
import anlit.data.corpora
import anlit.data.mixture  # noqa: F401
from anlit.config.labels import CONFIG, init_args, mapping
from anlit.config.objects import build_from_plain, shown, subclass_named
from anlit.config.schema import DATA_ORDER, setting_of
from anlit.config.start_folder import data_paths_from_start, message_on_move
from anlit.data.module import TokenShards
from anlit.data.needle import NeedleInHaystack
from anlit.data.storage.remote import is_remote
from anlit.errors import UserError
from anlit.reporting.text import say
from anlit.training.checkpoint_record import refuse_other_tokenizer
from anlit.training.load_model import Checkpoint


def load_validation_data(checkpoint: Checkpoint, path: str | None = None) -> TokenShards:
    """Load the data of the checkpoint's run, or the prepared folder `path` with the run's settings.

    `context_length` is the model's and `val_tokens` the run's. Change them before
    `setup("validate")`.

    Raises:
        UserError: Neither the run's data nor a path is known. The folder is missing or damaged. The
            model was trained with another tokenizer.
    """
    location = "--data" if checkpoint.run is None else f"{checkpoint.run / CONFIG}: data"
    settings = _validation_settings(checkpoint)
    if path is None:
        if checkpoint.run is not None and checkpoint.config is not None:
            moved = message_on_move(checkpoint.run, checkpoint.config)
            if moved is not None:
                say(moved)
        data_class = _class_of_data(checkpoint, settings, location)
    else:
        data_class = TokenShards
        settings["path"] = path
    # The texts of needles come from a prepared folder, which is evaluated instead.
    if path is not None or data_class is NeedleInHaystack:
        data_class = TokenShards
        parameters = inspect.signature(TokenShards).parameters
        settings = {key: value for key, value in settings.items() if key in parameters}
    try:
        data = build_from_plain(data_class, settings, location)
    except TypeError as error:  # an argument is missing
        raise UserError(
            f"{location} is not complete ({error}): set --data to a prepared folder"
        ) from error
    data.context_length = checkpoint.training_length
    data.val_context_length = data.val_blocks = None  # all blocks, in the length of training
    _check_tokenizer(checkpoint, data)
    return data


def _validation_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of the run's data that are for its validation data too."""
    if checkpoint.run is None or checkpoint.config is None:
        return {}
    settings = {}
    for key, value in init_args(checkpoint.config.get("data")).items():
        if _is_of_validation(key):
            settings[key] = value
    return settings | data_paths_from_start(checkpoint.run, checkpoint.config)


def _class_of_data(checkpoint: Checkpoint, settings: dict[str, Any], location: str) -> Any:
    """Return the class of the run's data. Raises UserError if the run has none of anlit's."""
    trained_on = checkpoint.trained_on or {}
    if "class" in trained_on:
        raise UserError(
            f"{checkpoint.file} was trained on {shown(trained_on['class'])}, whose batches this "
            "command cannot cut into other lengths: set --data to a prepared folder of its "
            "tokenizer; anlit validate has the loss on its own batches"
        )
    class_path = mapping((checkpoint.config or {}).get("data")).get("class_path")
    if not isinstance(class_path, str):
        raise UserError(
            f"{checkpoint.file} is not in a run folder that names its data: set --data to a folder"
        )
    _refuse_addresses(settings, location)
    return subclass_named(TokenShards, class_path, location)


def _is_of_validation(key: str) -> bool:
    """Return whether a setting of the run's data is for its validation data too.

    The order of training does not matter here, but the run's batch fits into memory. Tools read
    in this process.
    """
    if key == "num_workers":
        return False
    return key == "batch_size" or setting_of(f"data.{key}").role is not DATA_ORDER


def _refuse_addresses(settings: dict[str, Any], location: str) -> None:
    """Raise UserError if a run's configuration names an address as data.

    The run folder may come from someone else, and must not send this user's credentials anywhere.
    """
    for value in (*settings.values(), *mapping(settings.get("paths")).values()):
        if isinstance(value, str) and is_remote(value):
            raise UserError(
                f"{location} names the address {shown(value)}, which is read only if you give it: "
                "set --data to it"
            )


def _check_tokenizer(checkpoint: Checkpoint, data: TokenShards) -> None:
    """Raise UserError if the model was trained with another tokenizer than the data have."""
    try:
        fingerprint = data.fingerprint
    except UserError as error:  # `fit` calls the option --data.path
        raise UserError(str(error).replace("--data.path", "--data")) from error
    owner = f"the shards in {data.path} have"
    fix = "set --data to shards of that tokenizer"
    refuse_other_tokenizer(checkpoint.trained_on, fingerprint, str(checkpoint.file), fix, owner)
    if checkpoint.model.vocab_size < data.vocab_size:  # every token needs a row
        raise UserError(
            f"{checkpoint.file} has a vocabulary of {checkpoint.model.vocab_size} tokens and the "
            f"shards in {data.path} have {data.vocab_size}: "
            "set --data to shards of the model's tokenizer"
        )


def set_validation_pieces(data: TokenShards, piece: int, tokens: int, batch_tokens: int) -> None:
    """Set the data to validate on pieces of `piece` targets, evenly spread over the split.

    Args:
        data: Data whose validation split has at least one piece.
        tokens: Targets in total, a multiple of `piece`. All complete pieces if there are fewer.
        batch_tokens: Targets in a batch, which has at least one piece.
    """
    data.val_tokens = data.n_targets("val") // piece * piece
    data.val_blocks = tokens // piece if tokens < data.val_tokens else None
    data.val_context_length = piece
    data.val_batch_size = max(1, batch_tokens // piece)
    data.setup("validate")

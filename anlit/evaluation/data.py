"""The data that a checkpoint is evaluated on."""

import inspect

import anlit.data.corpora
import anlit.data.mixture  # noqa: F401  a configuration may name any of them, and classes that are not imported are refused
from anlit.config.labels import CONFIG, mapping
from anlit.config.objects import build_from_plain, shown, subclass_named
from anlit.data.module import TokenShards
from anlit.data.needle import NeedleInHaystack
from anlit.data.storage.remote import is_remote
from anlit.errors import UserError
from anlit.training.load_model import Checkpoint

# These settings are about training and its validation, not about the content of the validation split.
OF_TRAINING = (
    "context_length",
    "context_schedule",
    "num_workers",
    "weights",
    "val_context_length",
    "val_blocks",
)


def data_of(checkpoint: Checkpoint, path: str | None = None) -> TokenShards:
    """The data of the checkpoint's run, or of the prepared folder `path` with the run's settings.

    `context_length` is that of the model and `val_tokens` that of the run; change them before `setup("validate")`.
    UserError if neither the run's data nor a path is known, the folder is missing or damaged, or the model was trained
    with another tokenizer.
    """
    section = mapping((checkpoint.config or {}).get("data"))
    settings = {
        key: value
        for key, value in mapping(section.get("init_args")).items()
        if key not in OF_TRAINING
    }
    where, kind = f"{checkpoint.file.parent.parent / CONFIG}: data", TokenShards
    if path is not None:
        settings["path"] = path
    elif isinstance(section.get("class_path"), str):
        for value in (*settings.values(), *mapping(settings.get("paths")).values()):
            # The run folder may be someone else's, and must not send this user's credentials anywhere.
            if isinstance(value, str) and is_remote(value):
                advice = "which is read only if you give it: set --data to it"
                raise UserError(f"{where} names the address {shown(value)}, {advice}")
        kind = subclass_named(TokenShards, section["class_path"], where)
    else:
        raise UserError(
            f"{checkpoint.file} is not in a run folder that names its data: set --data to a folder"
        )
    if path is not None or kind is NeedleInHaystack:  # whose text is that of a prepared folder
        kind, known = TokenShards, inspect.signature(TokenShards).parameters
        settings = {key: value for key, value in settings.items() if key in known}
    try:
        data = build_from_plain(kind, settings, where)
    except TypeError as error:  # an argument is missing
        raise UserError(
            f"{where} is not complete ({error}): set --data to a prepared folder"
        ) from error
    data.context_length = checkpoint.training_length
    try:
        now = data.manifest["tokenizer_sha256"]
    except UserError as error:  # whose option is --data.path in `fit`
        raise UserError(str(error).replace("--data.path", "--data")) from error
    then = now if checkpoint.trained_on is None else checkpoint.trained_on.get("tokenizer_sha256")
    if then != now:
        trained, ours = (f"{sha256[:12]}…" if sha256 else "none" for sha256 in (then, now))
        raise UserError(
            f"{checkpoint.file} was trained with another tokenizer ({trained}) than the shards in {data.path} have "
            f"({ours}): set --data to shards of that tokenizer"
        )
    if checkpoint.model.vocab_size < data.vocab_size:  # at least every token must have a row
        raise UserError(
            f"{checkpoint.file} has a vocabulary of {checkpoint.model.vocab_size} tokens and the shards in {data.path} "
            f"have {data.vocab_size}: set --data to shards of the model's tokenizer"
        )
    return data


def spread(data: TokenShards, piece: int, tokens: int, batch_tokens: int) -> None:
    """Set the data to validate on pieces of `piece` targets, evenly spread over the split, which has at least one.

    There are `tokens` targets in total, a multiple of `piece`, or all complete pieces if there are fewer; in a batch
    `batch_tokens`, or one piece.
    """
    data.val_tokens = data.n_targets("val") // piece * piece
    data.val_blocks = tokens // piece if tokens < data.val_tokens else None
    data.val_context_length = piece
    data.val_batch_size = max(1, batch_tokens // piece)
    data.setup("validate")

"""A checkpoint's tokenizer and the token that ends its documents."""

from pathlib import Path

from tokenizers import Tokenizer

from anlit.analysis.runs import mapping
from anlit.data.module import TokenShards
from anlit.data.tokenizer import END_OF_DOCUMENT, file_sha256, load_tokenizer
from anlit.errors import UserError
from anlit.evaluation.checkpoint import Checkpoint
from anlit.training.exported import END, TOKENIZER, is_exported, read_settings


def find_tokenizer(checkpoint: Checkpoint, given: str | None = None) -> Path | None:
    """The tokenizer.json of a model: the one `given`, else its exported folder's, else that of its data; None if none.

    One in a folder is taken only if it is the tokenizer that the model was trained with.

    Raises:
        UserError: `given` is no tokenizer, another one than the model's, or has tokens that the model does not.
    """
    if given is not None:
        _check(Path(given), checkpoint)
        return Path(given)
    folders = [checkpoint.file] if is_exported(checkpoint.file) else []
    folders += _data_folders(checkpoint)
    files = (folder / TOKENIZER for folder in folders)
    return next((file for file in files if file.is_file() and _is_the_models(file, checkpoint)), None)


def tokenizer_of(checkpoint: Checkpoint, given: str | None = None) -> Tokenizer:
    """The tokenizer itself.

    Raises:
        UserError: As in `find_tokenizer`, or there is none.
    """
    file = find_tokenizer(checkpoint, given)
    if file is None:
        raise UserError(
            f"the tokenizer of {checkpoint.file} is neither beside it nor with its data: set --tokenizer to the "
            "tokenizer.json that its data was prepared with"
        )
    return load_tokenizer(file)


def end_of_document(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> int | None:
    """The id of the token that ends a document: as exported, else as its data says, else <|endoftext|> if it exists."""
    if is_exported(checkpoint.file) and (exported := read_settings(checkpoint.file).get(END)) is not None:
        return exported
    for folder in _data_folders(checkpoint):
        try:
            manifest = TokenShards(str(folder)).manifest
        except UserError:  # the data has gone
            continue
        if manifest["content_sha256"] == (checkpoint.trained_on or {}).get("content_sha256"):
            return manifest[END]
    return tokenizer.token_to_id(END_OF_DOCUMENT) if tokenizer is not None else None


def _data_folders(checkpoint: Checkpoint) -> list[Path]:
    """Where the data lay when the model was trained, and where its run's config.yaml says; local ones."""
    configured = mapping(mapping((checkpoint.config or {}).get("data")).get("init_args")).get("path")
    paths = dict.fromkeys(((checkpoint.trained_on or {}).get("path"), configured))
    return [Path(path) for path in paths if path and "://" not in path]


def _is_the_models(file: Path, checkpoint: Checkpoint) -> bool:
    expected = (checkpoint.trained_on or {}).get("tokenizer_sha256")
    return expected is None or file_sha256(file) == expected


def _check(file: Path, checkpoint: Checkpoint) -> None:
    tokenizer = load_tokenizer(file)
    if not _is_the_models(file, checkpoint):
        raise UserError(
            f"--tokenizer {file} is not the one that {checkpoint.file} was trained with: give that of its data"
        )
    if tokenizer.get_vocab_size() > checkpoint.model.vocab_size:
        raise UserError(
            f"--tokenizer {file} has {tokenizer.get_vocab_size()} tokens and the model {checkpoint.model.vocab_size}: "
            "give the tokenizer that the model was trained with"
        )

"""The tokenizer of a checkpoint, and how its documents end."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer

from anlit.checkpoints.exported import read_settings
from anlit.checkpoints.loading import Checkpoint
from anlit.checkpoints.location import is_exported
from anlit.data.storage.manifest import TOKENIZER, read_bytes
from anlit.data.storage.remote import is_remote
from anlit.data.tokenizer import END_OF_DOCUMENT, parse_tokenizer, vocabulary_size
from anlit.errors import UserError
from anlit.inference.generation import Ending


class MissingTokenizerError(UserError):
    """A checkpoint has no tokenizer, and the user named none."""


@dataclass(frozen=True, eq=False)
class CheckpointTokenizer:
    """A tokenizer, and how its corpus separates documents."""

    tokenizer: Tokenizer
    content: bytes
    """The content of tokenizer.json."""
    ending: Ending

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without separators."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without separators; � for incomplete characters."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def prompt(self, text: str, checkpoint: Checkpoint) -> list[int]:
        """The tokens of a document that begins with `text`, after a separator if the model saw one in training.

        A model that was imported and not trained here saw the tokens that its tokenizer puts in front of a text.
        """
        tokens = self.encode(text)
        if checkpoint.family is not None and checkpoint.trained_on is None:
            whole = self.tokenizer.encode(text, add_special_tokens=True)
            n_special = sum(1 for _ in takewhile(bool, whole.special_tokens_mask))
            return [*whole.ids[:n_special], *tokens]
        is_seen = self.ending.at == "start" or not checkpoint.model.model.document_masking
        return [self.ending.token, *tokens] if is_seen and self.ending.token is not None else tokens


def text_of(checkpoint: Checkpoint, tokenizer: str | None = None) -> CheckpointTokenizer:
    """The tokenizer of a checkpoint: the named one (a tokenizer.json, or a folder or address that has it), else that of
    its run or exported folder, else that of its data. The separator of documents is that of the training data.

    Raises:
        MissingTokenizerError: There is none.
        UserError: It cannot be read, or the model was trained with another one.
    """
    content, path = _named(tokenizer) if tokenizer is not None else _find(checkpoint)
    parsed = parse_tokenizer(content, path)
    trained_on, vocabulary = checkpoint.trained_on or {}, checkpoint.model.vocab_size
    then, now = trained_on.get("tokenizer_sha256"), sha256(content).hexdigest()
    if then and then != now:
        raise UserError(
            f"{checkpoint.file} was trained with another tokenizer ({then[:12]}…) than this one ({now[:12]}…): "
            "set --tokenizer to the tokenizer.json of its data"
        )
    if (size := vocabulary_size(parsed)) > vocabulary:
        raise UserError(
            f"the tokenizer has {size:,} tokens, but the model knows {vocabulary:,}: "
            "set --tokenizer to the one that it was trained with"
        )
    record = read_settings(checkpoint.file) if is_exported(checkpoint.file) else {}
    record = record if record.get("end_of_document") is not None else trained_on
    end = record.get("end_of_document")
    if type(end) is not int or not 0 <= end < vocabulary:
        end = parsed.token_to_id(END_OF_DOCUMENT)
    return CheckpointTokenizer(
        parsed, content, Ending(end, "start" if record.get("document_token_at") == "start" else "end")
    )


def _named(tokenizer: str) -> tuple[bytes, str]:
    """The content of the tokenizer.json that the user named, and its path."""
    path = tokenizer.rstrip("/")
    if not path.endswith(".json") and (is_remote(path) or Path(path).is_dir()):
        path = f"{path}/{TOKENIZER}"
    try:
        return read_bytes(path), path
    except OSError as error:
        raise UserError(f"There is no tokenizer at {path}: set --tokenizer to the path of a tokenizer.json") from error


def _find(checkpoint: Checkpoint) -> tuple[bytes, str]:
    """The content of tokenizer.json in the run folder, the exported one or that of the data, and its path."""
    file, data = checkpoint.file, str((checkpoint.trained_on or {}).get("path") or "")
    folders = [str(file if is_exported(file) else checkpoint.run or ""), data]
    folders = [folder for folder in folders if folder and not is_remote(folder)]  # no file may make us read an address
    for folder in folders:
        path = f"{folder}/{TOKENIZER}"
        with suppress(OSError):
            return read_bytes(path), path
    looked = f" (looked in {', '.join(folders)})" if folders else ""
    raise MissingTokenizerError(
        f"{file} has no tokenizer{looked}: set --tokenizer to its tokenizer.json, or to the address of its data"
    )

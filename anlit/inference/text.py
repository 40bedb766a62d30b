"""The tokenizer of a checkpoint, and how its documents end."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from os.path import commonprefix
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

    def continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """The text that tokens add to that of a prompt, without separators; � for incomplete characters.

        Alone they would lose the space before them where it is in their first token, as with Llama's tokenizer.
        """
        begun, whole = (
            self.tokenizer.decode([*ids], skip_special_tokens=True)
            for ids in (prompt, [*prompt, *tokens])
        )
        return whole[len(commonprefix([begun, whole])) :]  # noqa: RUF071  of characters

    def prompt(self, text: str, checkpoint: Checkpoint) -> list[int]:
        """The tokens of a document that begins with `text`, after what the model saw before one in training."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if first := self._first(checkpoint):
            return [*first, *tokens]
        is_seen = self.ending.at == "start" or not checkpoint.model.model.document_masking
        return [self.ending.token, *tokens] if is_seen and self.ending.token is not None else tokens

    def before(self, checkpoint: Checkpoint) -> Ending:
        """What a text is scored after: the separator of documents, or what an imported model's texts begin with.

        UserError if they begin with several.
        """
        first = self._first(checkpoint)
        if len(first) > 1:
            what = f"the tokenizer puts {len(first)} tokens in front of a text, and a text is scored after one"
            raise UserError(
                f"{what}: set --tokenizer to a tokenizer.json whose post_processor has one"
            )
        return Ending(first[0], "start") if first else self.ending

    def _first(self, checkpoint: Checkpoint) -> list[int]:
        """The special tokens that the tokenizer of an imported model puts in front of a text, such as Llama's `<s>`.

        None if the model was trained here: it saw the separators of its data instead.
        """
        if checkpoint.is_trained_here:
            return []
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        return whole.ids[: sum(takewhile(bool, whole.special_tokens_mask))]


def text_of(checkpoint: Checkpoint, tokenizer: str | None = None) -> CheckpointTokenizer:
    """The tokenizer of a checkpoint: the named one (a tokenizer.json, or a folder or address that has it), else that of
    its run or exported folder, else that of its data. The separator of documents is that of the training data.

    MissingTokenizerError if there is none; UserError if it cannot be read, or the model was trained with another one.
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
        parsed,
        content,
        Ending(end, "start" if record.get("document_token_at") == "start" else "end"),
    )


def _named(tokenizer: str) -> tuple[bytes, str]:
    """The content of the tokenizer.json that the user named, and its path."""
    path = tokenizer.rstrip("/")
    if not path.endswith(".json") and (is_remote(path) or Path(path).is_dir()):
        path = f"{path}/{TOKENIZER}"
    try:
        return read_bytes(path), path
    except OSError as error:
        raise UserError(
            f"There is no tokenizer at {path}: set --tokenizer to the path of a tokenizer.json"
        ) from error


def _find(checkpoint: Checkpoint) -> tuple[bytes, str]:
    """The content of tokenizer.json in the run folder, the exported one or that of the data, and its path."""
    file, data = checkpoint.file, str((checkpoint.trained_on or {}).get("path") or "")
    folders = [str(file if is_exported(file) else checkpoint.run or ""), data]
    folders = [
        folder for folder in folders if folder and not is_remote(folder)
    ]  # no file may make us read an address
    for folder in folders:
        path = f"{folder}/{TOKENIZER}"
        with suppress(OSError):
            return read_bytes(path), path
    looked = f" (looked in {', '.join(folders)})" if folders else ""
    raise MissingTokenizerError(
        f"{file} has no tokenizer{looked}: set --tokenizer to its tokenizer.json, or to the address of its data"
    )

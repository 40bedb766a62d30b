"""The tokenizer of a checkpoint, and how its documents end."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path

from tokenizers import Tokenizer

from anlit.checkpoints.exported import read_settings
from anlit.checkpoints.location import is_exported
from anlit.checkpoints.special_tokens import (
    SpecialTokens,
    read_special_tokens,
    text_folder,
    token_ids,
)
from anlit.data.storage.manifest import TOKENIZER, read_bytes
from anlit.data.storage.remote import is_remote
from anlit.data.tokenizer import END_OF_DOCUMENT, parse_tokenizer, vocabulary_size
from anlit.errors import UserError
from anlit.evaluation.chat import Message, render_chat
from anlit.evaluation.generation import Ending
from anlit.training.load_model import Checkpoint

INCOMPLETE = "�"
"""What bytes are decoded to that are no character, or not yet."""
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token of one byte, of tokenizers that fall back to bytes."""


class MissingTokenizerError(UserError):
    """A checkpoint has no tokenizer, and the user named none."""


@dataclass(frozen=True, eq=False)
class CheckpointTokenizer:
    """A tokenizer, and how its corpus separates documents."""

    tokenizer: Tokenizer
    content: bytes
    """The content of tokenizer.json."""
    ending: Ending
    special: SpecialTokens = SpecialTokens()
    """What the model that the weights come from says of its special tokens."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which a continuation ends: those of the first model, and the separator of documents."""
        tokens = [*self.special.ends]
        if self.ending.token is not None:
            tokens.append(self.ending.token)
        return tuple(dict.fromkeys(tokens))

    def prompt(self, text: str, checkpoint: Checkpoint) -> list[int]:
        """The tokens of a document that begins with `text`, after what the model saw before one in training.

        An empty text is the beginning of a document. A text that itself begins with the token before a text, which
        `text_of` can let it have, does not get a second one. UserError if no token stands for an empty text.
        """
        tokens = self.encode(text)
        if not tokens:
            return [self._begin(checkpoint)]
        first = self._first(checkpoint)
        if self.ending.token is not None and self._sees_separator(checkpoint):
            first = [self.ending.token]
        return tokens if tokens[: len(first)] == first else [*first, *tokens]

    def borders(self, checkpoint: Checkpoint, is_chat: bool) -> Ending:
        """The separator that ends a document also inside of a text; none in a conversation or for an imported model.

        An end of a turn would hide the earlier turns from attention.
        """
        return Ending() if is_chat or not checkpoint.is_trained_here else self.ending

    def chat(self, messages: Sequence[Message], is_answered: bool = False) -> str:
        """The text of a conversation by the model's chat template; UserError if it has none, or it refuses this one.

        Encode it with special tokens, see `text_of`, and with nothing before it.
        """
        template = self.special.chat_template
        if template is None:
            raise UserError(
                "--chat needs a chat template, and the model has none: put a tokenizer_config.json with chat_template "
                "beside its tokenizer.json, or leave out --chat"
            )
        return render_chat(template, messages, self.special.texts, is_answered)

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
        if first:
            return Ending(first[0], "start")
        if not checkpoint.is_trained_here and self.special.begin is not None:
            return Ending(self.special.begin)
        return self.ending

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _begin(self, checkpoint: Checkpoint) -> int:
        """The token after which a document begins; UserError if the vocabulary has none."""
        first = self._first(checkpoint)
        token = first[-1] if first else self.before(checkpoint).token
        if token is None:
            raise UserError(
                "the prompt is empty, and the model has no token that begins a document: give some text to continue"
            )
        return token

    def _sees_separator(self, checkpoint: Checkpoint) -> bool:
        """Whether the model was trained here, and the texts of training saw the separator before them."""
        is_masked = checkpoint.model.model.document_masking
        return checkpoint.is_trained_here and (self.ending.at == "start" or not is_masked)

    def _first(self, checkpoint: Checkpoint) -> list[int]:
        """The special tokens that the tokenizer of an imported model puts in front of a text, such as Llama's `<s>`.

        None if the model was trained here: it saw the separators of its data instead.
        """
        if checkpoint.is_trained_here:
            return []
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        return whole.ids[: sum(takewhile(bool, whole.special_tokens_mask))]


class TextStream:
    """The text of a continuation, token by token: each piece is complete, and is never taken back.

    Two things wait for the tokens after them. Bytes wait until they are a character. Tokens that are bytes, such as
    `<0xE2>`, wait for one that is none, because the tokenizer decodes a row of them as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        """Begin after a prompt. Its last tokens tell whether the text begins with a space, as in Llama's tokenizer."""
        self._tokenizer = tokenizer
        self._context = [*prompt]
        while self._context and self._is_byte(self._context[-1]):
            self._context.pop()
        self._waiting: list[int] = []

    def add(self, token: int) -> str:
        """The text that is complete with this token and was not before; often empty."""
        self._waiting.append(token)
        if self._is_byte(token):
            return ""
        text = self._new_text()
        if not text or text.endswith(INCOMPLETE):
            return ""
        self._context, self._waiting = self._waiting, []
        return text

    def rest(self) -> str:
        """The text of the tokens that still wait; � for incomplete characters."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._context)
        whole = self._decode(self._context + self._waiting)
        return whole[len(commonprefix([before, whole])) :]  # noqa: RUF071  of characters

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _is_byte(self, token: int) -> bool:
        return BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that tokens add to that of a prompt, without special tokens; � for incomplete characters."""
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in tokens]
    return "".join(pieces) + stream.rest()


def text_of(
    checkpoint: Checkpoint, tokenizer: str | None = None, special_tokens: bool = False
) -> CheckpointTokenizer:
    """The tokenizer of a checkpoint: the named one (a tokenizer.json, or a folder or address that has it), else that of
    its run or exported folder, else that of its data. The separator of documents is that of the training data.

    `special_tokens`: whether the name of a special token in a text is that token. Otherwise it is letters.

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
    ending = Ending(end, "start" if record.get("document_token_at") == "start" else "end")
    parsed.encode_special_tokens = not special_tokens
    return CheckpointTokenizer(parsed, content, ending, _special_tokens(checkpoint, path, parsed))


def _special_tokens(checkpoint: Checkpoint, path: str, tokenizer: Tokenizer) -> SpecialTokens:
    """The special tokens beside the tokenizer, else beside the checkpoint, without those outside the vocabulary."""
    beside = None if is_remote(path) else Path(path).parent
    for folder in (beside, text_folder(checkpoint.file)):
        special = SpecialTokens() if folder is None else read_special_tokens(folder)
        if special != SpecialTokens():
            return _within(special, tokenizer, checkpoint.model.vocab_size)
    return SpecialTokens()


def _within(special: SpecialTokens, tokenizer: Tokenizer, vocabulary: int) -> SpecialTokens:
    """The special tokens with ids that the model knows; an id that is missing is that of the token's text."""
    generation_config = dict(special.generation_config)
    for name in ("bos_token_id", "eos_token_id"):
        tokens = token_ids(generation_config.get(name))
        allowed = [token for token in tokens if token < vocabulary]
        text = special.texts.get(name.removesuffix("_id"))
        if not allowed and text is not None:
            token = tokenizer.token_to_id(text)
            allowed = [] if token is None else [token]
        generation_config[name] = allowed[0] if len(allowed) == 1 else allowed or None
    return replace(special, generation_config=generation_config)


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

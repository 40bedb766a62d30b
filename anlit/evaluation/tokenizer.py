"""The tokenizer of a checkpoint, and how its documents are separated."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import takewhile
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
from anlit.data.storage.manifest import TOKENIZER, read_small_file
from anlit.data.storage.remote import is_remote
from anlit.data.tokenizer import END_OF_DOCUMENT, parse_tokenizer, vocabulary_size
from anlit.errors import UserError
from anlit.evaluation.chat import Message, render_chat
from anlit.evaluation.generation import Separator
from anlit.training.load_model import Checkpoint


class MissingTokenizerError(UserError):
    """A checkpoint has no tokenizer, and the user named none."""


@dataclass(frozen=True, eq=False)
class CheckpointTokenizer:
    """The tokenizer of a checkpoint, and how its corpus separates documents."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    content: bytes
    """The content of tokenizer.json."""
    separator: Separator
    """The separator of the training data."""
    special_tokens: SpecialTokens = SpecialTokens()
    """The special tokens of the imported model from which the weights come."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a continuation: the imported model's, and the separator."""
        tokens = [*self.special_tokens.eos_tokens]
        if self.separator.token is not None:
            tokens.append(self.separator.token)
        return tuple(dict.fromkeys(tokens))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a document that begins with `text`, after what training put before it.

        An empty text is the beginning of a document. If `text` begins with the special token
        before a text, the token is not doubled.

        Raises:
            UserError: The text is empty, and no token begins a document.
        """
        tokens = self.encode(text)
        if not tokens:
            return [self._begin_token()]
        prefix = self._prefix()
        if self.separator.token is not None and self._sees_separator():
            prefix = [self.separator.token]
        if tokens[: len(prefix)] == prefix:
            return tokens
        return [*prefix, *tokens]

    def inner_separator(self, is_chat: bool) -> Separator:
        """The separator that ends a document inside of a text.

        A conversation has none, nor a text of an imported model. The end of a turn would hide the
        earlier turns from attention.
        """
        if is_chat or not self.checkpoint.is_trained_here:
            return Separator()
        return self.separator

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation after which the model answers. Errors as in `render_chat`.

        Nothing precedes them. The tokenizer has to know special tokens in texts (see
        `load_checkpoint_tokenizer`).
        """
        return self.encode(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Message], is_answered: bool = False) -> str:
        """Render a conversation with the model's chat template.

        Raises:
            UserError: The model has no template, or it refuses this conversation.
        """
        return render_chat(self.chat_template, messages, self.special_tokens.texts, is_answered)

    @property
    def chat_template(self) -> str:
        """The model's chat template; UserError if it has none."""
        template = self.special_tokens.chat_template
        if template is None:
            raise UserError(
                "--chat needs a chat template, and the model has none: put a tokenizer_config.json "
                "with chat_template beside its tokenizer.json, or leave out --chat"
            )
        return template

    def scoring_separator(self) -> Separator:
        """The separator after which a text is scored, or the first token of an imported model.

        Raises:
            UserError: Texts of an imported model begin with several tokens.
        """
        prefix = self._prefix()
        if len(prefix) > 1:
            raise UserError(
                f"the tokenizer puts {len(prefix)} tokens in front of a text, and a text is scored "
                "after one: set --tokenizer to a tokenizer.json whose post_processor has one"
            )
        if prefix:
            return Separator(prefix[0], "start")
        if not self.checkpoint.is_trained_here and self.special_tokens.bos_token is not None:
            return Separator(self.special_tokens.bos_token)
        return self.separator

    def _begin_token(self) -> int:
        """The token after which a document begins; UserError if the vocabulary has none."""
        prefix = self._prefix()
        token = prefix[-1] if prefix else self.scoring_separator().token
        if token is None:
            raise UserError(
                "the prompt is empty, and the model has no token that begins a document: "
                "give some text to continue"
            )
        return token

    def _sees_separator(self) -> bool:
        """Whether a model trained here saw the separator before the texts of training."""
        is_masked = self.checkpoint.model.model.document_masking
        return self.checkpoint.is_trained_here and (self.separator.at == "start" or not is_masked)

    def _prefix(self) -> list[int]:
        """The special tokens that an imported model's tokenizer puts in front of a text.

        An example is Llama's `<s>`. A model trained here has none: it saw the separators of its
        data instead.
        """
        if self.checkpoint.is_trained_here:
            return []
        encoding = self.tokenizer.encode("a", add_special_tokens=True)
        n_special = sum(takewhile(bool, encoding.special_tokens_mask))
        return encoding.ids[:n_special]


def load_checkpoint_tokenizer(
    checkpoint: Checkpoint, tokenizer: str | None = None, special_tokens: bool = False
) -> CheckpointTokenizer:
    """Load the tokenizer of a checkpoint, with the separator of its training data.

    Args:
        checkpoint: Its run, its exported folder or else its data have the tokenizer.
        tokenizer: A tokenizer.json to use instead, or a folder or address that has it.
        special_tokens: Whether the name of a special token in a text is that token. Otherwise it
            is letters.

    Raises:
        MissingTokenizerError: There is none.
        UserError: It cannot be read, or the model was trained with another tokenizer.
    """
    if tokenizer is None:
        path, content = _find_tokenizer(checkpoint)
    else:
        path = _tokenizer_path(tokenizer)
        try:
            content = read_small_file(path)
        except OSError as error:
            raise UserError(
                f"there is no tokenizer at {path}: set --tokenizer to the path of a tokenizer.json"
            ) from error
    return checkpoint_tokenizer(checkpoint, content, path, special_tokens)


def checkpoint_tokenizer(
    checkpoint: Checkpoint, content: bytes, path: str, special_tokens: bool = False
) -> CheckpointTokenizer:
    """The tokenizer with this content, for a checkpoint.

    Args:
        checkpoint: Tells how documents are separated.
        content: The content of tokenizer.json.
        path: The file in error messages. Special tokens may lie beside it.
        special_tokens: As in `load_checkpoint_tokenizer`.

    Raises:
        UserError: It cannot be parsed, or the model was trained with another tokenizer.
    """
    parsed = parse_tokenizer(content, path)
    _check_fits_model(checkpoint, parsed, content)
    separator = _separator(checkpoint, parsed)
    parsed.encode_special_tokens = not special_tokens
    special = _find_special_tokens(checkpoint, path, parsed)
    return CheckpointTokenizer(checkpoint, parsed, content, separator, special)


def _check_fits_model(checkpoint: Checkpoint, tokenizer: Tokenizer, content: bytes) -> None:
    """Raise UserError if the model was trained with another tokenizer, or knows fewer tokens."""
    trained_sha256 = (checkpoint.trained_on or {}).get("tokenizer_sha256")
    tokenizer_sha256 = sha256(content).hexdigest()
    if trained_sha256 and trained_sha256 != tokenizer_sha256:
        raise UserError(
            f"{checkpoint.file} was trained with another tokenizer ({trained_sha256[:12]}…) "
            f"than this one ({tokenizer_sha256[:12]}…): "
            "set --tokenizer to the tokenizer.json of its data"
        )
    n_tokens = vocabulary_size(tokenizer)
    if n_tokens > checkpoint.model.vocab_size:
        raise UserError(
            f"the tokenizer has {n_tokens:,} tokens, but the model knows "
            f"{checkpoint.model.vocab_size:,}: set --tokenizer to the one that it was trained with"
        )


def _separator(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Separator:
    """The separator of the training data, by an export's record or the checkpoint's."""
    record = checkpoint.trained_on or {}
    if is_exported(checkpoint.file):
        settings = read_settings(checkpoint.file)
        if settings.get("end_of_document") is not None:
            record = settings
    token = record.get("end_of_document")
    if type(token) is not int or not 0 <= token < checkpoint.model.vocab_size:
        token = tokenizer.token_to_id(END_OF_DOCUMENT)
    at_start = record.get("document_token_at") == "start"
    return Separator(token, "start" if at_start else "end")


def _find_special_tokens(
    checkpoint: Checkpoint, tokenizer_path: str, tokenizer: Tokenizer
) -> SpecialTokens:
    """The special tokens beside the tokenizer, else beside the checkpoint.

    Tokens outside the vocabulary are left out.
    """
    folders = [text_folder(checkpoint.file)]
    if Path(tokenizer_path).is_file():  # neither an address nor the name of a user's data
        folders.insert(0, Path(tokenizer_path).parent)
    for folder in filter(None, folders):
        special = read_special_tokens(folder)
        if special != SpecialTokens():
            return _limit_to_vocabulary(special, tokenizer, checkpoint.model.vocab_size)
    return SpecialTokens()


def _limit_to_vocabulary(
    special: SpecialTokens, tokenizer: Tokenizer, vocabulary: int
) -> SpecialTokens:
    """Keep the ids that the model knows. If no id is left, look up the token's text."""
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


def _tokenizer_path(tokenizer: str) -> str:
    """The path or address of tokenizer.json for the option --tokenizer."""
    path = tokenizer.rstrip("/")
    if not path.endswith(".json") and (is_remote(path) or Path(path).is_dir()):
        path = f"{path}/{TOKENIZER}"
    return path


def _find_tokenizer(checkpoint: Checkpoint) -> tuple[str, bytes]:
    """Path and content of tokenizer.json: of the run or exported folder, else of the data."""
    model_folder = checkpoint.file if is_exported(checkpoint.file) else checkpoint.run
    data_folder = (checkpoint.trained_on or {}).get("path")
    # An address in a checkpoint is not read: it may come from someone else.
    folders = [str(folder) for folder in (model_folder, data_folder) if folder]
    local_folders = [folder for folder in folders if not is_remote(folder)]
    for folder in local_folders:
        path = f"{folder}/{TOKENIZER}"
        with suppress(OSError):
            return path, read_small_file(path)
    places = f" (looked in {', '.join(local_folders)})" if local_folders else ""
    raise MissingTokenizerError(
        f"{checkpoint.file} has no tokenizer{places}: "
        "set --tokenizer to its tokenizer.json, or to the address of its data"
    )

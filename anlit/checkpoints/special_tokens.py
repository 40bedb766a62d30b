"""The special tokens of an imported model, in the files of transformers beside tokenizer.json.

FOLDER/tokenizer_config.json     the texts of special tokens, and the chat template
FOLDER/generation_config.json    the ids of special tokens, and settings of generation

`anlit import` writes both files. A run from these weights, and an export, copy them to its folder.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anlit.checkpoints.exported import TOKENIZER
from anlit.checkpoints.location import is_exported, run_of
from anlit.errors import UserError
from anlit.io.read import read_json, read_text
from anlit.io.write import write_json

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
"""The file that may hold the chat template of tokenizer_config.json."""
TOKENS_MAP = "special_tokens_map.json"
"""The file that may hold the texts of special tokens."""
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of generation_config.json and config.json for the ids of special tokens."""
TEXT_SCHEMA = {
    "chat_template": (str, list),
    "bos_token": (str, dict),
    "eos_token": (str, dict),
    "pad_token": (str, dict),
    "unk_token": (str, dict),
}
"""The types of the values in tokenizer_config.json. Null or a missing key means no value."""
IGNORED_KEYS = ("_from_model_config", "transformers_version", "auto_map")
"""Keys that an import leaves out: the origin of the file, and code in the folder."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of an imported model; empty for a model without these files.

    Args:
        tokenizer_config: tokenizer_config.json with the chat template in it.
        generation_config: generation_config.json with the ids from this file or config.json.
    """

    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def bos_token(self) -> int | None:
        """The token before a text (BOS)."""
        return next(iter(token_ids(self.generation_config.get("bos_token_id"))), None)

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end a generated text (EOS)."""
        return token_ids(self.generation_config.get("eos_token_id"))

    @property
    def chat_template(self) -> str | None:
        """The template of a conversation; from several templates, the template named default."""
        template = self.tokenizer_config.get("chat_template")
        if not isinstance(template, list):
            return template
        templates = {entry["name"]: entry["template"] for entry in reversed(template)}
        return templates.get("default")

    @property
    def texts(self) -> dict[str, str]:
        """The texts of special tokens by transformers' names, such as `bos_token`."""
        texts = {}
        for name, text in self.tokenizer_config.items():
            if name.endswith("_token") and isinstance(text, str):
                texts[name] = text
        return texts

    def write(self, folder: Path) -> None:
        """Write the files with content into a folder; a missing folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = {
            TOKENIZER_CONFIG: self.tokenizer_config,
            GENERATION_CONFIG: self.generation_config,
        }
        for name, content in contents.items():
            if content:
                write_json(folder / name, content, indent=2)


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids in a value such as `eos_token_id`: a number, a list or None.

    -1 means no token.
    """
    tokens = value if isinstance(value, list) else [value]
    return tuple(token for token in tokens if token is not None and token >= 0)


def read_special_tokens(folder: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Read the special tokens of a folder of transformers, or of anlit.

    Args:
        config: The content of config.json; its ids replace missing ids in generation_config.json.

    Raises:
        UserError: A file is damaged, or transformers would not read the type of a value.
    """
    advice = "correct it, or download it again"
    generation = read_json(folder / GENERATION_CONFIG, dict, advice, missing={})
    for name in ID_KEYS:
        if generation.get(name) is None and config is not None:
            generation[name] = config.get(name)
        _check_ids(generation.get(name), folder, name)
    tokens_map = read_json(folder / TOKENS_MAP, TEXT_SCHEMA, advice, missing={})
    tokenizer = read_json(folder / TOKENIZER_CONFIG, TEXT_SCHEMA, advice, missing={})
    tokenizer = _as_texts(tokens_map) | _as_texts(tokenizer)
    if (folder / TEMPLATE_FILE).is_file():
        tokenizer["chat_template"] = _read_template(folder / TEMPLATE_FILE)
    _check_templates(tokenizer.get("chat_template"), folder)
    if "auto_map" in tokenizer:
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    return SpecialTokens(_without_origin(tokenizer), _without_origin(generation))


def _as_texts(record: dict[str, Any]) -> dict[str, Any]:
    """The values except null, with tokens as texts: tokenizer.json has their properties."""
    texts: dict[str, Any] = {}
    for name, value in record.items():
        if name.endswith("_token") and isinstance(value, dict):
            value = value.get("content")
        if value is not None:
            texts[name] = value
    return texts


def _without_origin(record: dict[str, Any]) -> dict[str, Any]:
    """The record without the keys that an import ignores, and without null."""
    imported = {}
    for key, value in record.items():
        if key not in IGNORED_KEYS and value is not None:
            imported[key] = value
    return imported


def _check_ids(value: Any, folder: Path, name: str) -> None:
    tokens = value if isinstance(value, list) else [value]
    if not {type(token) for token in tokens} <= {int, type(None)}:
        raise UserError(
            f"{folder} has {name}={value!r:.40}, which is not a token's number: correct "
            f"{GENERATION_CONFIG}"
        )


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from error


def _check_templates(template: Any, folder: Path) -> None:
    entries = template if isinstance(template, list) else []
    if not all(map(_is_named_template, entries)):
        raise UserError(
            f"{folder / TOKENIZER_CONFIG} has chat templates without name and template: correct it"
        )


def _is_named_template(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    return isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def text_folder(checkpoint: Path) -> Path | None:
    """The folder with a checkpoint's tokenizer: exported model or run; None for a lone file."""
    return checkpoint if is_exported(checkpoint) else run_of(checkpoint)


def has_tokenizer(folder: Path, sha256: str | None) -> bool:
    """Whether tokenizer.json of a folder has this SHA-256."""
    path = folder / TOKENIZER
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256

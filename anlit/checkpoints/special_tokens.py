"""What a model of transformers says of its special tokens, beside tokenizer.json and in transformers' own form.

FOLDER/tokenizer_config.json     the texts of special tokens, and the chat template
FOLDER/generation_config.json    the ids of special tokens, and how transformers generates

`anlit import` writes both files. A run from these weights keeps them in its folder, an export in its own.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anlit.checkpoints.exported import TOKENIZER
from anlit.checkpoints.location import CHECKPOINTS, is_exported
from anlit.errors import UserError
from anlit.io.read import read_json, read_text
from anlit.io.write import write_json

TOKENIZER_CONFIG, GENERATION_CONFIG = "tokenizer_config.json", "generation_config.json"
TEMPLATE_FILE, TOKENS_MAP = "chat_template.jinja", "special_tokens_map.json"
"""Files of transformers that may hold a part of tokenizer_config.json."""
IDS = {"bos_token_id": (int, list), "eos_token_id": (int, list), "pad_token_id": int}
TEXTS = {
    "chat_template": (str, list),
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), (str, dict)),
}
"""The types of what is read from the files; null or a missing key stands for nothing."""
LEFT_OUT = ("_from_model_config", "transformers_version", "auto_map")
"""Keys that an import does not take: the origin of the file, and code in the folder."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model from elsewhere; empty for a model that has none of the files.

    Args:
        tokenizer_config: tokenizer_config.json with the chat template in it.
        generation_config: generation_config.json with the ids that it or config.json has.
    """

    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def begin(self) -> int | None:
        """The token before a text (BOS)."""
        return next(iter(token_ids(self.generation_config.get("bos_token_id"))), None)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens of which each ends a generated text."""
        return token_ids(self.generation_config.get("eos_token_id"))

    @property
    def chat_template(self) -> str | None:
        """The template of a conversation; of several, the one named default."""
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            return next(
                (entry["template"] for entry in template if entry["name"] == "default"), None
            )
        return template

    @property
    def texts(self) -> dict[str, str]:
        """The texts of special tokens by transformers' names, such as `bos_token`."""
        return {
            name: text
            for name, text in self.tokenizer_config.items()
            if name.endswith("_token") and isinstance(text, str)
        }

    def write(self, folder: Path) -> None:
        """Write the files that have a content into a folder, which is made where missing."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = {
            TOKENIZER_CONFIG: self.tokenizer_config,
            GENERATION_CONFIG: self.generation_config,
        }
        for name, content in contents.items():
            if content:
                write_json(folder / name, content, indent=2)


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids in a value of `eos_token_id` and its like: a number, a list or None; -1 stands for no token."""
    tokens = value if isinstance(value, list) else [value]
    return tuple(token for token in tokens if token is not None and token >= 0)


def read_special_tokens(folder: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Read the special tokens of a folder of transformers, or of anlit.

    Args:
        config: The content of config.json, whose ids hold where generation_config.json has none.

    Raises:
        UserError: A file is damaged, or a value has another type than transformers reads.
    """
    advice = "correct it, or download it again"
    generation = read_json(folder / GENERATION_CONFIG, dict, advice, missing={})
    for name in IDS:
        if generation.get(name) is None and config is not None:
            generation[name] = config.get(name)
        _check_ids(generation.get(name), folder, name)
    tokens_map = read_json(folder / TOKENS_MAP, TEXTS, advice, missing={})
    tokenizer = read_json(folder / TOKENIZER_CONFIG, TEXTS, advice, missing={})
    tokenizer = _as_texts(tokens_map) | _as_texts(tokenizer)
    if (folder / TEMPLATE_FILE).is_file():
        tokenizer["chat_template"] = _read_template(folder / TEMPLATE_FILE)
    _check_templates(tokenizer.get("chat_template"), folder)
    if "auto_map" in tokenizer:
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    return SpecialTokens(_without_origin(tokenizer), _without_origin(generation))


def _as_texts(record: dict[str, Any]) -> dict[str, Any]:
    """The values that are there, tokens as texts: tokenizer.json has their other properties."""
    texts: dict[str, Any] = {}
    for name, value in record.items():
        if name.endswith("_token") and isinstance(value, dict):
            value = value.get("content")
        if value is not None:
            texts[name] = value
    return texts


def _without_origin(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in record.items() if key not in LEFT_OUT and value is not None
    }


def _check_ids(value: Any, folder: Path, name: str) -> None:
    tokens = value if isinstance(value, list) else [value]
    if any(token is not None and type(token) is not int for token in tokens):
        raise UserError(
            f"{folder} has {name}={value!r:.40}, which is no token's number: correct {GENERATION_CONFIG}"
        )


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): download it again") from error


def _check_templates(template: Any, folder: Path) -> None:
    entries = template if isinstance(template, list) else []
    keys = ("name", "template")
    if not all(
        isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in keys)
        for entry in entries
    ):
        raise UserError(
            f"{folder / TOKENIZER_CONFIG} has chat templates without name and template: correct it"
        )


def text_folder(checkpoint: Path) -> Path | None:
    """The folder with the tokenizer of a checkpoint: an exported one, or that of its run; None for a lone file."""
    if is_exported(checkpoint):
        return checkpoint
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def has_tokenizer(folder: Path, sha256: str | None) -> bool:
    """Whether the tokenizer.json of a folder has this SHA-256."""
    path = folder / TOKENIZER
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256

"""Small tokenizers of the kinds that published models have, with the files that lie beside them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from anlit.data.tokenizer import train_bpe
from tests.evaluation.saved import TEXTS

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
WORDS = ["the", "cat", "and", "dog"]
LETTERS = "abcdefghijklmnopqrstuvwxyz.,![]/INST\n"


def _special(tokenizer: Tokenizer, *names: str) -> None:
    tokens = [AddedToken(name, special=True) for name in names]
    tokenizer.add_special_tokens(tokens)


def _begin_with(tokenizer: Tokenizer, token: str) -> None:
    ids = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=ids)


def byte_level() -> Tokenizer:
    """As Qwen's and SmolLM2's: bytes as letters, and nothing before a text."""
    tokenizer = train_bpe(TEXTS, 290)
    _special(tokenizer, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return tokenizer


def byte_level_with_begin() -> Tokenizer:
    """As Llama 3's: the same with a token before a text."""
    tokenizer = byte_level()
    _begin_with(tokenizer, "<|im_start|>")
    return tokenizer


def _number(pieces: list[str]) -> dict[str, int]:
    """The id of each piece; a piece that comes twice has its first place."""
    unique_pieces = dict.fromkeys(pieces)
    return dict(zip(unique_pieces, range(len(unique_pieces)), strict=True))


def byte_fallback(prepends_space: bool = False) -> Tokenizer:
    """As Gemma's: letters, and `<0xE2>` for the bytes of others."""
    bytes_as_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({*LETTERS, *"▁".join(WORDS)})
    pieces = ["<unk>", *bytes_as_tokens, *letters]
    merges = []
    for word in WORDS:
        left = "▁"
        for letter in word:
            merges.append((left, letter))
            left += letter
            pieces.append(left)
    model = models.BPE(
        _number(pieces),
        list(dict.fromkeys(merges)),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prepends_space:
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    _special(tokenizer, "<s>", "</s>")
    _begin_with(tokenizer, "<s>")
    return tokenizer


def byte_fallback_with_space() -> Tokenizer:
    """As Llama 2's: the same, with a space before each text, which decoding takes away."""
    return byte_fallback(prepends_space=True)


def metaspace() -> Tokenizer:
    """As T5's and some Mistral's: words with their space."""
    words = [f"▁{word}" for word in WORDS]
    model = models.WordLevel(_number(["<unk>", *words]), "<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _special(tokenizer, "<s>", "</s>")
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "Qwen": byte_level,
    "Llama 3": byte_level_with_begin,
    "Gemma": byte_fallback,
    "Llama 2": byte_fallback_with_space,
    "T5": metaspace,
}


def write_tokenizer(folder: Path, kind: str, **generation: Any) -> Tokenizer:
    """Put tokenizer.json and its companions into a folder of transformers.

    They are tokenizer_config.json and generation_config.json.
    """
    tokenizer = KINDS[kind]()
    begin, end, template = ("<s>", "</s>", INST)
    if tokenizer.token_to_id("<|im_start|>") is not None:
        begin, end, template = ("<|im_start|>", "<|im_end|>", CHATML)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": {"__type": "AddedToken", "content": end, "lstrip": False, "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    record = {
        "bos_token_id": tokenizer.token_to_id(begin),
        "eos_token_id": tokenizer.token_to_id(end),
        **generation,
    }
    (folder / "generation_config.json").write_text(json.dumps(record))
    return tokenizer

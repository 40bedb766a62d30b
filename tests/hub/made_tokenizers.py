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
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content | trim }} "
    "[/INST]{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
WORDS = ["the", "cat", "and", "dog"]


def _special(tokenizer: Tokenizer, *names: str) -> None:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])


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


def byte_fallback(prepends_space: bool = False) -> Tokenizer:
    """As Gemma's: letters, and `<0xE2>` for the bytes of others."""
    letters = sorted({*"▁".join(WORDS), *"abcdefghijklmnopqrstuvwxyz.,![]/INST\n"})
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = []
    for word in WORDS:
        for end in range(1, len(word) + 1):
            left, right = f"▁{word[: end - 1]}", word[end - 1]
            merges.append((left, right))
            pieces.append(left + right)
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    unique = list(dict.fromkeys(merges))
    tokenizer = Tokenizer(
        models.BPE(vocabulary, unique, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
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
    pieces = ["<unk>", *(f"▁{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.WordLevel({p: n for n, p in enumerate(pieces)}, "<unk>"))
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
    """Put tokenizer.json, tokenizer_config.json and generation_config.json into a folder of transformers."""
    tokenizer = KINDS[kind]()
    is_chatml = tokenizer.token_to_id("<|im_start|>") is not None
    begin, end = ("<|im_start|>", "<|im_end|>") if is_chatml else ("<s>", "</s>")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": {"__type": "AddedToken", "content": end, "lstrip": False, "special": True},
        "chat_template": CHATML if is_chatml else INST,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ids = {name: tokenizer.token_to_id(text) for name, text in (("bos", begin), ("eos", end))}
    record = {f"{name}_token_id": token for name, token in ids.items()} | generation
    (folder / "generation_config.json").write_text(json.dumps(record))
    return tokenizer

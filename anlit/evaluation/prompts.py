"""The prompts of samples: texts, a file, or the beginnings of documents."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from anlit.data.batch import document_ids
from anlit.data.storage.store import TokenStore
from anlit.errors import UserError
from anlit.evaluation.documents import read_documents
from anlit.evaluation.text_stream import REPLACEMENT

N_DOCUMENTS = 4
"""Documents of the validation split whose first words are the default prompts."""
N_FIRST_TOKENS = 16
"""Tokens of a default prompt, at most."""
SEARCHED_TOKENS = 1 << 16
"""Tokens of each validation array in which the beginnings of documents are searched."""


def read_prompts(prompts: list[str] | str | None) -> list[str] | None:
    """The prompts of a list or a file; UserError if there is none."""
    if prompts is None:
        return None
    if isinstance(prompts, str):
        if not Path(prompts).is_file():
            raise UserError(
                f"Samples has prompts={prompts}, which is no file: give a file or a list of texts"
            )
        prompts = [prompt for prompt, _ in read_documents([prompts], "prompt")]
    if not prompts:
        raise UserError(
            "Samples has no prompt: give one, or leave prompts out for the beginnings of documents"
        )
    return prompts


def document_beginnings(data: Any, tokenizer: Tokenizer) -> list[str]:
    """The first words of up to four documents of the validation split, from each array in turn.

    Documents that begin alike count once. Raises UserError if the split has no text.
    """
    beginnings = []
    for store in data.stores("val"):
        documents = _first_documents(store, data.manifest)
        beginnings.append(_decode_beginnings(tokenizer, documents))
    in_turn = chain.from_iterable(zip_longest(*beginnings))
    prompts = list(dict.fromkeys(filter(None, in_turn)))[:N_DOCUMENTS]
    if not prompts:
        raise UserError(f"{data.path}/val has no text to begin samples with: set Samples' prompts")
    return prompts


def _first_documents(store: TokenStore, manifest: Mapping[str, Any]) -> list[np.ndarray]:
    """The tokens of the documents at the beginning of an array, with their separators."""
    tokens = store.read(0, min(store.n_tokens, SEARCHED_TOKENS))
    ids = document_ids(tokens[None], manifest["end_of_document"], manifest["document_token_at"])[0]
    return np.split(tokens, np.flatnonzero(np.diff(ids)) + 1)


def _decode_beginnings(tokenizer: Tokenizer, documents: Iterable[np.ndarray]) -> Iterator[str]:
    """Yield the first words of each document that has any."""
    for tokens in documents:
        text = tokenizer.decode(tokens[:N_FIRST_TOKENS].tolist(), skip_special_tokens=True)
        text = text.rstrip(REPLACEMENT)  # a character that was cut in two
        if text.strip():
            yield text

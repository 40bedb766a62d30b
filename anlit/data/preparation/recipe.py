"""What is to be prepared: everything that decides what the shards hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anlit.data import tokenizer as tokenizers
from anlit.data.preparation.formats import Columns
from anlit.data.preparation.hub import fetch_tokenizer
from anlit.data.preparation.sources import Source, file_sha256
from anlit.data.preparation.splits import Splits

HUB_TOKENIZERS = {"gpt2": "openai-community/gpt2", "gpt-neox": "EleutherAI/gpt-neox-20b"}
BPE, NO_TOKENIZER = "bpe", "none"
GPT2_VOCABULARY, GPT2_END_OF_DOCUMENT = 50257, 50256

MIB = 1 << 20
CHUNK_BYTES = 64 * MIB
TASK_BYTES = 64 * MIB  # the chunks of a task are its own, so they should not be small
GROUP_BYTES = 512 * MIB


@dataclass(frozen=True)
class Recipe:
    """A corpus and how it becomes tokens. The sizes shape the chunks, so they are never taken from the machine."""

    corpus: str
    source: Source
    splits: Splits
    columns: Columns = field(default_factory=Columns)
    tokenizer: str = BPE
    """gpt2, gpt-neox, the path of a tokenizer.json, bpe (trained on the corpus), or none for .bin files."""
    vocab_size: int = 4096
    """Of the BPE that is trained on the corpus."""
    end_of_document: str = tokenizers.END_OF_DOCUMENT
    tokenized: bool = False
    """The source files hold tokens already, each document after its end-of-document token (.bin)."""
    chunk_bytes: int = CHUNK_BYTES
    task_bytes: int = TASK_BYTES
    """Source bytes that a worker encodes at once."""
    group_bytes: int = GROUP_BYTES
    """Source bytes of a group. A kill loses no group whose chunks are written."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """More settings that are compared with those of an existing folder."""

    def settings(self) -> dict[str, Any]:
        """The settings that an existing folder must have been made with."""
        tokenizer = {"vocab_size": self.vocab_size} if self.tokenizer == BPE else {"tokenizer": self.tokenizer_name()}
        return {
            "corpus": self.corpus,
            **self.origin,
            **self.source.settings(),
            **tokenizer,
            "end_of_document": self.end_of_document,
            "splits": self.splits.settings(),
            "text": self.columns.text,
            "subset": self.columns.subset,
            "max_document_bytes": self.columns.max_document_bytes,
            "chunk_bytes": self.chunk_bytes,
            "task_bytes": self.task_bytes,
            "group_bytes": self.group_bytes,
        }

    def tokenizer_name(self) -> str:
        """The tokenizer's name, or of a file its content's hash: the same wherever the file lies.

        Raises:
            UserError: there is no such file.
        """
        if self.tokenizer in (*HUB_TOKENIZERS, BPE, NO_TOKENIZER):
            return self.tokenizer
        tokenizers.load_tokenizer(self.tokenizer)
        return "sha256:" + file_sha256(self.tokenizer)

    def tokenizer_file(self) -> Path:
        """The tokenizer.json of a tokenizer that exists already.

        Raises:
            UserError: it cannot be fetched, or is not a tokenizer.
        """
        if self.tokenizer in HUB_TOKENIZERS:
            return Path(fetch_tokenizer(HUB_TOKENIZERS[self.tokenizer]))
        tokenizers.load_tokenizer(self.tokenizer)
        return Path(self.tokenizer)

"""A prepared folder as the models' data read it: what it holds, its tokenizer and its token arrays."""

from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from anlit.data.storage.manifest import TOKENIZER, check_tokenizer, read_manifest, read_tokenizer
from anlit.data.storage.shards import Source, check_sizes, sources_of
from anlit.data.tokenizer import parse_tokenizer


class PreparedFolder:
    """A prepared folder; nothing is read before it is asked for.

    Args:
        path: local, or an address that litdata fetches from (s3://, gs://, hf://).
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        self._sources: dict[str, dict[str, list[Source]]] = {}

    @property
    def folders(self) -> list[str]:
        """The paths of all folders; a mixture has several."""
        return [self.path]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json.

        Raises:
            UserError: it is missing or damaged.
        """
        return read_manifest(self.path)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the data in a run's record."""
        of_content = ("corpus", "content_sha256", "documents", "bytes", "tokens")
        keys = (*of_content, "tokenizer_sha256", "vocab_size", "end_of_document", "document_token_at")
        found = {key: self.manifest[key] for key in keys if key in self.manifest}
        return {"path": self.path, **found, **{split: self.manifest[split] for split in self.manifest["splits"]}}

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, with the special ones."""
        return self.manifest["vocab_size"]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            UserError: the folder has none or another one, or it cannot be read.
        """
        return parse_tokenizer(self.tokenizer_content, f"{self.folders[0]}/{TOKENIZER}")

    @property
    def tokenizer_content(self) -> bytes:
        """The content of tokenizer.json; errors are those of `tokenizer`."""
        return read_tokenizer(self.folders[0], self.manifest)

    def bytes_per_token(self, split: str = "val") -> float | None:
        """Bytes of text per token, end-of-document tokens counted: turns nats per token into bits per byte.

        None where the text is not known.
        """
        counts = self.manifest.get(split, self.manifest["val"])
        return counts["bytes"] / counts["tokens"] if counts["bytes"] else None

    def sources(self, split: str) -> dict[str, list[Source]]:
        """The token arrays of a split, by the names that weights are given for.

        Raises:
            UserError: an index is missing or damaged.
        """
        if split not in self._sources:
            self._sources[split] = self._read_sources(split)
        return self._sources[split]

    def all_sources(self, split: str) -> list[Source]:
        """The token arrays of a split, in order."""
        return [source for group in self.sources(split).values() for source in group]

    def check(self) -> None:
        """Compare the local files with the manifest and the index: the tokenizer, and the chunks' sizes.

        Raises:
            UserError: one is missing or another one.
        """
        for folder in self.folders:
            check_tokenizer(folder, self.manifest)
        for split in self.manifest["splits"]:
            for source in self.all_sources(split):
                check_sizes(source)

    def _read_sources(self, split: str) -> dict[str, list[Source]]:
        return {source.name: [source] for source in sources_of(self.path, self.manifest, split)}

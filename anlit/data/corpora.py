"""The corpora as DataModules: the big ones are prepared once by `anlit prepare`, the small ones make their shards."""

import os
from pathlib import Path
from typing import Any

from anlit.data.module import TokenShards
from anlit.data.preparation.prepare import prepare
from anlit.data.preparation.recipes import FINEWEB_VAL_TOKENS, Options, python_sources, text_files
from anlit.data.tokenizer import END_OF_DOCUMENT
from anlit.errors import UserError


class _PreparedCorpus(TokenShards):
    """A corpus that was made by `anlit prepare`."""

    def prepare_data(self) -> None:
        """UserError, with the command that prepares it, for a folder that is missing or holds another corpus."""
        name = type(self).__name__
        if "://" not in self.path and not Path(self.path).is_dir():
            raise UserError(
                f"There is no folder {self.path} with {name}: prepare it with `anlit prepare {name} --output "
                f"{self.path}`, or set --data.path to where it is."
            )
        if self.manifest["corpus"] != name:
            raise UserError(
                f"{self.path} holds {self.manifest['corpus']} and not {name}: set --data.path to another folder, "
                "or read it with --data TokenShards."
            )


class SlimPajama(_PreparedCorpus):
    """SlimPajama-627B (cerebras), prepared by `anlit prepare SlimPajama`.

    `weights` may name its subsets: RedPajamaCommonCrawl, RedPajamaC4, RedPajamaGithub, RedPajamaBook,
    RedPajamaArXiv, RedPajamaWikipedia, RedPajamaStackExchange.
    """

    def __init__(self, path: str = "data/slimpajama", **kwargs: Any) -> None:
        super().__init__(path, **kwargs)


class OpenWebText(_PreparedCorpus):
    """OpenWebText (Skylion007), prepared by `anlit prepare OpenWebText`."""

    def __init__(self, path: str = "data/openwebtext", **kwargs: Any) -> None:
        super().__init__(path, **kwargs)


class FineWeb(_PreparedCorpus):
    """A sample of FineWeb (HuggingFaceFW), prepared by `anlit prepare FineWeb`."""

    def __init__(
        self, path: str = "data/fineweb", val_tokens: int | None = FINEWEB_VAL_TOKENS, **kwargs: Any
    ) -> None:
        super().__init__(path, val_tokens=val_tokens, **kwargs)


class FineWebBin(FineWeb):
    """FineWeb's published token files (kjj0), prepared by `anlit prepare FineWebBin`.

    With `shuffle: false` the training order is that of the files, as in the runs that were published with them.
    """

    def __init__(self, path: str = "data/finewebbin", **kwargs: Any) -> None:
        super().__init__(path, **kwargs)


class PythonSources(TokenShards):
    """The running interpreter's standard library as a corpus of about 30 MB; nothing is downloaded.

    Each different UTF-8 file is one document, held out or not by a hash of its content.

    Args:
        path: folder of the shards; prepared there if it does not exist.
        include_site_packages: whether to add the installed packages' sources.
        vocab_size: size of the byte-level BPE that is trained on the training part.
        val_fraction: part of the documents that is held out for validation.
    """

    def __init__(
        self, path: str = "data/python", include_site_packages: bool = False, vocab_size: int = 4096,
        val_fraction: float = 0.05, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(path, **kwargs)
        self.options = Options(
            include_site_packages=include_site_packages,
            vocab_size=vocab_size,
            val_fraction=val_fraction,
        )

    def prepare_data(self) -> None:
        """Make the shards, once per node."""
        prepare(self.path, python_sources(self.options), "anlit fit with the same --data")


class TextFiles(TokenShards):
    """Any folder of UTF-8 text files as a corpus; each different file is one document.

    Files of JSON lines (.json, .jsonl, also .gz or .zst) and parquet hold many documents, one in each line or row.

    Args:
        source: folder with the text files; not needed any more once the shards exist.
        path: folder of the shards; prepared there if it does not exist.
        pattern: which files, as a glob under source.
        vocab_size: size of the byte-level BPE that is trained on the training part.
        tokenizer: gpt2, gpt-neox or the path of a tokenizer.json, to use instead of training one.
        end_of_document: the token of that tokenizer that ends a document.
        val_fraction: part of the documents that is held out for validation.
        text_field: of JSON lines and parquet, the field that holds the text.
    """

    def __init__(
        self, source: str, path: str = "data/text", pattern: str = "**/*.txt", vocab_size: int = 4096,
        tokenizer: str | None = None, end_of_document: str = END_OF_DOCUMENT, val_fraction: float = 0.05,
        text_field: str = "text", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(path, **kwargs)
        self.options = Options(
            source=os.path.expanduser(source), pattern=pattern, vocab_size=vocab_size,
            tokenizer=os.path.expanduser(tokenizer) if tokenizer else None, end_of_document=end_of_document,
            val_fraction=val_fraction, text_field=text_field,
        )  # fmt: skip

    def prepare_data(self) -> None:
        """Make the shards, once per node; UserError if there are no files to make them from."""
        prepare(self.path, text_files(self.options), "anlit fit with the same --data")

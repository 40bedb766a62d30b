"""The corpora as DataModules: `anlit prepare` makes the large corpora, fit makes the small ones."""

from pathlib import Path
from typing import Any

from anlit.data.module import TokenShards
from anlit.data.preparation.recipes import RECIPES, Recipe, recipe_of
from anlit.errors import UserError

COMMAND = "anlit fit with the same --data"
"""The command that makes the shards of a small corpus, in its manifest."""


class _PreparedCorpus(TokenShards):
    """A corpus that was made by `anlit prepare`."""

    def prepare_data(self) -> None:
        """Raise UserError, with the command to prepare it, if the folder lacks this corpus."""
        name = type(self).__name__
        if "://" not in self.path and not Path(self.path).is_dir():
            raise UserError(
                f"There is no folder {self.path} with {name}: prepare it with "
                f"`anlit prepare {name} --output {self.path}`, or set --data.path to its folder"
            )
        if self.manifest["corpus"] != name:
            raise UserError(
                f"{self.path} holds {self.manifest['corpus']} and not {name}: set --data.path to "
                "another folder, or read it with --data TokenShards"
            )


class SlimPajama(_PreparedCorpus):
    """SlimPajama-627B (cerebras), prepared by `anlit prepare SlimPajama`.

    `weights` may name its subsets: RedPajamaCommonCrawl, RedPajamaC4, RedPajamaGithub,
    RedPajamaBook, RedPajamaArXiv, RedPajamaWikipedia, RedPajamaStackExchange.
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
        self,
        path: str = "data/fineweb",
        val_tokens: int | None = RECIPES["FineWeb"].val_tokens,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, val_tokens=val_tokens, **kwargs)


class FineWebBin(FineWeb):
    """FineWeb's published token files (kjj0), prepared by `anlit prepare FineWebBin`.

    With `shuffle: false` training reads the files in their order, as the runs published with them.
    """

    def __init__(self, path: str = "data/finewebbin", **kwargs: Any) -> None:
        super().__init__(path, **kwargs)


class PythonSources(TokenShards):
    """The running interpreter's standard library as a corpus of about 30 MB. Nothing is downloaded.

    Each different UTF-8 file is a document, held out or not by a hash of its content.

    Args:
        path: folder of the shards. Prepared there if it does not exist.
        include_site_packages: whether to add the installed packages' sources.
        vocab_size: size of the byte-level BPE that is trained on the training documents.
        val_fraction: fraction of the documents to hold out for validation.
    """

    def __init__(
        self,
        path: str = "data/python",
        include_site_packages: bool = False,
        vocab_size: int = 4096,
        val_fraction: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, **kwargs)
        self.recipe_options = {
            "include_site_packages": include_site_packages,
            "vocab_size": vocab_size,
            "val_fraction": val_fraction,
        }

    def prepare_data(self) -> None:
        """Make the shards, once per node."""
        _prepare(self.path, recipe_of("PythonSources", **self.recipe_options))


class TextFiles(TokenShards):
    """A folder of UTF-8 texts as a corpus: a document per text file, JSON line or parquet row.

    Copies of a text file count once. JSON lines end in .json or .jsonl, also in .gz or .zst.

    Args:
        source: folder with the text files. Not needed any more once the shards exist.
        path: folder of the shards. Prepared there if it does not exist.
        pattern: glob pattern of the files under source.
        vocab_size: size of the byte-level BPE that is trained on the training documents.
        tokenizer: gpt2, gpt-neox or the path of a tokenizer.json. By default one is trained.
        end_of_document: the token of that tokenizer that ends a document.
        val_fraction: fraction of the documents to hold out for validation.
        text_field: field of JSON lines and parquet that holds the text.
    """

    def __init__(
        self,
        source: str,
        path: str = "data/text",
        pattern: str = "**/*.txt",
        vocab_size: int = 4096,
        tokenizer: str | None = None,
        end_of_document: str = RECIPES["TextFiles"].end_of_document,
        val_fraction: float = 0.05,
        text_field: str = "text",
        **kwargs: Any,
    ) -> None:
        super().__init__(path, **kwargs)
        self.recipe_options = {
            "source": source,
            "pattern": pattern,
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
            "end_of_document": end_of_document,
            "val_fraction": val_fraction,
            "text_field": text_field,
        }

    def prepare_data(self) -> None:
        """Make the shards, once per node. Raise UserError if there are no files."""
        _prepare(self.path, recipe_of("TextFiles", **self.recipe_options))


def _prepare(path: str, recipe: Recipe) -> None:
    from anlit.data.preparation.prepare import prepare  # it imports hub and parquet

    prepare(path, recipe, COMMAND)

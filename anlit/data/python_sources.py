"""The corpus that every machine has: the Python interpreter's own sources."""

import platform
import sysconfig
from pathlib import Path

from anlit.data.corpus import SourceFile, list_files
from anlit.data.module import TokenShards
from anlit.data.prepare import Recipe, prepare

PACKAGE_FOLDERS = {"site-packages", "dist-packages"}


class PythonSources(TokenShards):
    """The running interpreter's standard library as a corpus of about 30 MB; nothing is downloaded.

    Each different UTF-8 file is one document, held out or not by a hash of its content.

    Args:
        path: folder of the shards; prepared there if it does not exist.
        include_site_packages: whether to add the installed packages' sources.
        vocab_size: size of the byte-level BPE that is trained on the training part.
        val_fraction: part of the documents that is held out for validation.
        batch_size: sequences per device and micro-batch.
        context_length: tokens per sequence; by default the model's.
        num_workers: loader processes per device; the order of the data depends on it.
        shuffle: whether to shuffle the training blocks; validation never is.
        seed: seed of the data order.
        score_first_token: whether the first token of a document that follows another in the same
            sequence counts in the loss.
        val_batch_size: sequences per device and validation batch; by default batch_size.
    """

    def __init__(
        self,
        path: str = "data/python",
        include_site_packages: bool = False,
        vocab_size: int = 4096,
        val_fraction: float = 0.05,
        batch_size: int = 8,
        context_length: int | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 42,
        score_first_token: bool = True,
        val_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            path, batch_size, context_length, num_workers, shuffle, seed, score_first_token, val_batch_size
        )
        self.include_site_packages = include_site_packages
        self.bpe_vocab_size = vocab_size
        self.val_fraction = val_fraction

    def prepare_data(self) -> None:
        """Make the shards, once per node."""
        recipe = Recipe(
            corpus="python",
            files=python_files(self.include_site_packages),
            vocab_size=self.bpe_vocab_size,
            val_fraction=self.val_fraction,
            origin={"python": platform.python_version(), "include_site_packages": self.include_site_packages},
        )
        prepare(self.path, recipe)


def python_files(include_site_packages: bool) -> list[SourceFile]:
    """Every *.py of the interpreter's standard library and, if asked for, of its installed packages."""
    paths = sysconfig.get_paths()
    library = list_files(Path(paths["stdlib"]), "**/*.py")
    files = [file for file in library if PACKAGE_FOLDERS.isdisjoint(Path(file.label).parts)]
    if include_site_packages:
        for folder in sorted({paths["purelib"], paths["platlib"]}):
            files += list_files(Path(folder), "**/*.py")
    return files

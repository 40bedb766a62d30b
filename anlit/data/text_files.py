"""A corpus of the user's own text files."""

from pathlib import Path

from anlit.data.corpus import list_files
from anlit.data.module import TokenShards
from anlit.data.prepare import Recipe, prepare
from anlit.data.tokenizer import END_OF_DOCUMENT
from anlit.errors import UserError


class TextFiles(TokenShards):
    """Any folder of UTF-8 text files as a corpus; each different file is one document.

    Args:
        source: folder with the text files; not needed any more once the shards exist.
        path: folder of the shards; prepared there if it does not exist.
        pattern: which files, as a glob under source.
        vocab_size: size of the byte-level BPE that is trained on the training part.
        tokenizer: path of a tokenizer.json to use instead of training one.
        end_of_document: the token of that tokenizer that ends a document.
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
        source: str,
        path: str = "data/text",
        pattern: str = "**/*.txt",
        vocab_size: int = 4096,
        tokenizer: str | None = None,
        end_of_document: str = END_OF_DOCUMENT,
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
        self.source = source
        self.pattern = pattern
        self.bpe_vocab_size = vocab_size
        self.tokenizer_file = tokenizer
        self.end_of_document = end_of_document
        self.val_fraction = val_fraction

    def prepare_data(self) -> None:
        """Make the shards, once per node.

        Raises:
            UserError: there are no files to make them from.
        """
        files = list_files(Path(self.source), self.pattern)
        if not files and not Path(self.path).is_dir():
            raise UserError(
                f"No file matches {self.pattern} in {self.source}: set --data.source to the folder with the "
                "text, or --data.pattern to what its files are called."
            )
        recipe = Recipe(
            corpus=f"text:{Path(self.source).name}",
            files=files,
            vocab_size=self.bpe_vocab_size,
            val_fraction=self.val_fraction,
            tokenizer=self.tokenizer_file,
            end_of_document=self.end_of_document,
            origin={"source": self.source, "pattern": self.pattern},
        )
        prepare(self.path, recipe)

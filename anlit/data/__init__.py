"""Corpora, their shards and the batches read from them."""

from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.module import TokenShards
from anlit.data.python_sources import PythonSources
from anlit.data.text_files import TextFiles

__all__ = ["Batch", "PythonSources", "TextFiles", "TokenShards", "batch_from_blocks"]

"""Corpora, their shards and the batches read from them."""

from importlib import import_module
from typing import Any

from anlit.discovery import classes_of

_HOME = {
    "Batch": "anlit.data.batch",
    "batch_from_blocks": "anlit.data.batch",
    "TokenShards": "anlit.data.module",
    "Mixture": "anlit.data.mixture",
}


def __getattr__(name: str) -> Any:
    """Import on first use: preparing needs neither torch nor lightning."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name[:1].isupper() and name in (corpora := classes_of("anlit.data.corpora")):
        return corpora[name]
    raise AttributeError(f"module 'anlit.data' has no attribute '{name}'")

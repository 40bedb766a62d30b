"""Corpora, their shards and the batches read from them."""

from importlib import import_module
from typing import Any

_HOME = {
    "Batch": "anlit.data.batch",
    "batch_from_blocks": "anlit.data.batch",
    "TokenShards": "anlit.data.module",
    "Mixture": "anlit.data.mixture",
    "SlimPajama": "anlit.data.corpora",
    "OpenWebText": "anlit.data.corpora",
    "FineWeb": "anlit.data.corpora",
    "FineWebBin": "anlit.data.corpora",
    "PythonSources": "anlit.data.corpora",
    "TextFiles": "anlit.data.corpora",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import on first use: preparing needs neither torch nor lightning."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'anlit.data' has no attribute '{name}'")

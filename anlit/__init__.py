"""anlit: train and compare GPT+, nGPT and anGPT on PyTorch Lightning."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "GPT": "anlit.models",
    "NGPT": "anlit.models",
    "AnGPT": "anlit.models",
    "RoPE": "anlit.layers.positions",
    "PRoPE": "anlit.layers.positions",
    "DynamicNTK": "anlit.layers.positions",
    "NoPE": "anlit.layers.positions",
    "PositionsPattern": "anlit.layers.positions",
    "Runtime": "anlit.models.runtime",
    "FullySharded": "anlit.training.strategies",
    "AdamW": "anlit.optim.optimizers",
    "MuonAdamW": "anlit.optim.optimizers",
    **dict.fromkeys(
        ("SlimPajama", "OpenWebText", "FineWeb", "FineWebBin", "PythonSources", "TextFiles", "Mixture", "TokenShards"),
        "anlit.data",
    ),
    "NeedleInHaystack": "anlit.evaluation.needle.data",
    "load_checkpoint": "anlit.checkpoints.loading",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import on first use, so that `anlit --help` need not load torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name[:1].isupper() and hasattr(mechanisms := import_module("anlit.attention.mechanisms"), name):
        return getattr(mechanisms, name)
    raise AttributeError(f"module 'anlit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The classes too, which are not imported yet."""
    return sorted({*globals(), *__all__})

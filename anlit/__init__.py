"""anlit: train and compare GPT+, nGPT and anGPT on PyTorch Lightning."""

from importlib import import_module
from typing import Any

from anlit.config.registry import public_classes

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("GPT", "NGPT", "AnGPT"), "anlit.training.models"),
    "Runtime": "anlit.nn.models.runtime",
    "FullySharded": "anlit.training.strategies",
    "TokenShards": "anlit.data.module",
    "Mixture": "anlit.data.mixture",
    "NeedleInHaystack": "anlit.data.needle",
    "load_checkpoint": "anlit.training.load_model",
}
_ROOMS = (
    "anlit.nn.mechanisms",
    "anlit.nn.layers.positions",
    "anlit.training.optim.optimizers",
    "anlit.training.optim.schedule",
    "anlit.data.corpora",
)
"""Each public class of these is `anlit.<Name>`; a room that needs more packages comes later."""


def __getattr__(name: str) -> Any:
    """Import on first use, so that `anlit --help` need not load torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    for room in _ROOMS if name[:1].isupper() else ():
        if name in (classes := public_classes(room)):
            return classes[name]
    raise AttributeError(f"module 'anlit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The classes too, which are not imported yet."""
    return sorted({*globals(), *_HOME, *(name for room in _ROOMS for name in public_classes(room))})

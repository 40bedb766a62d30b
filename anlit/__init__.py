"""anlit: train and compare GPT+, nGPT and anGPT on PyTorch Lightning."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "Runtime": "anlit.nn.models.runtime",
    "FullySharded": "anlit.training.strategies",
    "TokenShards": "anlit.data.module",
    "TokenData": "anlit.data.token_data",
    "Mixture": "anlit.data.mixture",
    "NeedleInHaystack": "anlit.data.needle",
    "Samples": "anlit.evaluation.samples",
    "load_checkpoint": "anlit.evaluation.trained_model",
}
"""Public name → the module that defines it."""
_MODULES_OF_CLASSES = (
    "anlit.nn.mechanisms",
    "anlit.nn.layers.positions",
    "anlit.training.optim.optimizers",
    "anlit.training.optim.schedule",
    "anlit.training.models",
    "anlit.data.corpora",
)
"""Modules that make each public class `anlit.<Name>`; modules that import more come later."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `anlit --help` need not load torch."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name[:1].isupper():
        from anlit.config.registry import public_classes  # a command imports `anlit` first

        for module in _MODULES_OF_CLASSES:
            classes = public_classes(module)
            if name in classes:
                return classes[name]
    raise AttributeError(f"module 'anlit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """List the classes too that are not imported yet."""
    from anlit.config.registry import public_classes

    names = {*globals(), *_MODULES}
    for module in _MODULES_OF_CLASSES:
        names.update(public_classes(module))
    return sorted(names)

"""The shape of a training step, the tokens in it, and the presets of `anlit benchmark step`."""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from anlit.benchmarks.options import DTYPES
from anlit.benchmarks.peers.training_step import random_blocks

MEAN_DOCUMENT = 1 / 4
"""Mean length of a packed document, in T."""
BASE = "GPT"
"""What the others' times are put beside."""
NAMES = {"GPT": "GPT+", "transformers": "Qwen3"}
"""How tables call a model, where they call it otherwise."""
HOW = {"no": "eager", "blocks": "compiled", "whole": "compiled whole", "float8": "compiled, float8"}
OURS_COMPILED = ("no", "blocks", "float8")
NUMBERS = ("d_model", "n_layers", "n_heads", "vocab_size", "length", "batch")


@dataclass(frozen=True)
class Size:
    """A model's shape and its batch's; the MLP is 4·d wide, embedding and head are apart.

    Args:
        label: How the tables call it.
        d_model, n_layers, n_heads, vocab_size: The network.
        length: T, tokens in a sequence.
        batch: Sequences.
        dtype: Of products: bfloat16 under autocast, where parameters stay float32; or float32.
    """

    label: str
    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    length: int
    batch: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """In a batch."""
        return self.batch * self.length

    @property
    def title(self) -> str:
        """All of it, for a table."""
        shape = f"d {self.d_model}, L {self.n_layers}, T {self.length}, B {self.batch}, V {self.vocab_size}"
        return f"{self.label} ({shape}, {self.as_json()['dtype']})"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """--d_model and so on, --dtype."""
    for field in NUMBERS:
        parser.add_argument(f"--{field}", type=int, metavar="N", help="in place of the preset's")
    parser.add_argument("--dtype", choices=list(DTYPES), help="in place of the preset's")


def changed_size(size: Size, given: argparse.Namespace) -> Size:
    """The preset's with what was given in its place; then it has another label."""
    changes: dict[str, Any] = {field: value for field in NUMBERS if (value := getattr(given, field))}
    if given.dtype:
        changes["dtype"] = DTYPES[given.dtype]
    return replace(size, **changes, label=f"{size.label}, changed") if changes else size


def blocks_of(size: Size, documents: bool) -> tuple[np.ndarray, int]:
    """Random tokens (B, T + 1) and the id that ends a document, which occurs only with `documents`."""
    end = size.vocab_size - 1
    blocks = random_blocks(size.batch, size.length, size.vocab_size)
    if documents:
        blocks[np.random.default_rng(1).random(blocks.shape) < 1 / (MEAN_DOCUMENT * size.length)] = end
    return blocks, end


@dataclass(frozen=True)
class Variant:
    """What takes turns: a program's model, and how it is run.

    Args:
        model: GPT, nGPT, anGPT, or a peer: litgpt, transformers.
        compiled: no, blocks or whole; ours has no whole, and float8: compiled blocks with products in float8.
        mechanism: A name in `MECHANISMS` of the attention benchmark; ours only.
        backend: Attention's kernel; ours only.
    """

    model: str
    compiled: str = "no"
    mechanism: str = "plain"
    backend: str = "auto"

    @property
    def label(self) -> str:
        parts = [NAMES.get(self.model, self.model)]
        if self.mechanism != "plain":
            parts.append(self.mechanism)
        if self.backend != "auto":
            parts.append(self.backend)
        return " ".join((*parts, HOW[self.compiled]))

    @property
    def mode(self) -> str:
        """Eager, compiled in whichever way, or float8."""
        return {"no": "eager", "float8": "float8"}.get(self.compiled, "compiled")


@dataclass(frozen=True)
class Plan:
    """A preset.

    Args:
        size: The step.
        models, peers: Ours and theirs.
        compiled: Of ours, each.
        peers_compiled: Of theirs, each; the faster one of those that are compiled counts.
        mechanisms, backends: Attention's in ours, each with each.
        kinds: What is timed: train, and of ours infer (logits, folded).
        rounds: How often the variants take turns.
        repeats: Calls in a turn.
    """

    size: Size
    models: tuple[str, ...] = ("GPT", "nGPT", "anGPT")
    peers: tuple[str, ...] = ("litgpt", "transformers")
    compiled: tuple[str, ...] = ("no", "blocks")
    peers_compiled: tuple[str, ...] = ("no", "whole", "blocks")
    mechanisms: tuple[str, ...] = ("plain",)
    backends: tuple[str, ...] = ("auto",)
    kinds: tuple[str, ...] = ("train", "infer")
    rounds: int = 15
    repeats: int = 1

    def variants(self) -> list[Variant]:
        """All of ours, the compiled after the others, then the peers'."""
        ours = [
            Variant(model, compiled, mechanism, backend)
            for compiled in self.compiled
            for mechanism in self.mechanisms
            for backend in self.backends
            for model in self.models
        ]
        return ours + [Variant(peer, compiled) for peer in self.peers for compiled in self.peers_compiled]


def _on_gpu(label: str, d_model: int, n_layers: int, n_heads: int, **more: Any) -> Plan:
    size = Size(label, d_model, n_layers, n_heads, 50_304, 2048, 8, torch.bfloat16)
    settings = {"compiled": ("blocks",), "peers_compiled": ("whole",), "repeats": 5, "rounds": 10}
    return Plan(size, **{**settings, **more})


PRESETS = {
    "cpu": Plan(Size("d 256, 6 layers", 256, 6, 4, 4096, 256, 8, torch.float32)),
    "h200": _on_gpu("0.5B", 1024, 24, 16),
    "h200-125m": _on_gpu("125M", 512, 18, 8),
    # Weights and optimizer of each take 17 GB, and what a step keeps about 50 GB: there is no room for peers.
    "h200-1b": _on_gpu("1B", 1280, 36, 20, peers=(), kinds=("train",)),
}

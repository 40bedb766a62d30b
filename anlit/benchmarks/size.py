"""The shapes of a model and its batch, the options that change them, and random tokens."""

import argparse
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEAN_DOCUMENT = 1 / 4
"""Mean length of a packed document, as a share of T."""
NUMBERS = ("d_model", "n_layers", "n_heads", "vocab_size", "length", "batch")


@dataclass(frozen=True)
class Size:
    """The shapes of a model and its batch. The MLP is 4·d wide; embedding and head are separate.

    Args:
        d_model, n_layers, n_heads, vocab_size: The shape of the network.
        length: T, tokens in a sequence.
        batch: Sequences.
        dtype: The data type of products: float32, or bfloat16 under autocast with float32 parameters.
    """

    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    length: int
    batch: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """Tokens in a batch."""
        return self.batch * self.length

    @property
    def title(self) -> str:
        """All numbers, for a table."""
        shape = f"d {self.d_model}, L {self.n_layers}, T {self.length}, B {self.batch}, V {self.vocab_size}"
        return f"{shape}, {self.as_json()['dtype']}"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "dtype": str(self.dtype).removeprefix("torch.")}

    def at_length(self, length: int) -> "Size":
        """Sequences of another length, as many as hold the tokens of this batch, or one."""
        return replace(self, length=length, batch=max(1, self.tokens // length))


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """--d_model and so on, --dtype."""
    for field in NUMBERS:
        parser.add_argument(f"--{field}", type=int, metavar="N", help="replaces the built-in one")
    parser.add_argument("--dtype", choices=list(DTYPES), help="replaces the built-in one")


def changed_size(size: Size, given: argparse.Namespace) -> Size:
    """`size` with the given options in place of its numbers."""
    changes: dict[str, Any] = {field: value for field in NUMBERS if (value := getattr(given, field))}
    if given.dtype:
        changes["dtype"] = DTYPES[given.dtype]
    return replace(size, **changes)


def blocks_of(size: Size, documents: bool) -> tuple[np.ndarray, int]:
    """Random tokens (B, T + 1) and the id that ends a document, which occurs only with `documents`."""
    end = size.vocab_size - 1
    blocks = np.random.default_rng(0).integers(0, end, (size.batch, size.length + 1))
    if documents:
        blocks[np.random.default_rng(1).random(blocks.shape) < 1 / (MEAN_DOCUMENT * size.length)] = end
    return blocks, end

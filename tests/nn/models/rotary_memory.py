"""Count what QK-norm and RoPE read and write on a GPU: `python -m tests.nn.models.rotary_memory`.

Inductor writes the kernels of a GPU, without one, for the code of a block between the projections
and attention.
"""

import argparse
import functools
import itertools
import re
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from anlit import GPT, NGPT, AnGPT, RoPE
from anlit.nn.models import angpt, gpt, ngpt
from anlit.reporting.text import echo
from anlit.training.language_model import LanguageModel
from tests.nn.attention.flex_memory import RECORDING, record_graphs, write_code

N_ROWS = 8
LENGTH = 2048
D_MODEL = 1024
HOPPER = 90
ARCHITECTURES: dict[str, tuple[type[LanguageModel], ModuleType]] = {
    "GPT": (GPT, gpt),
    "NGPT": (NGPT, ngpt),
    "AnGPT": (AnGPT, angpt),
}


class Pass(NamedTuple):
    """The kernels of a forward or backward pass."""

    n_bytes: int
    """Bytes read and written by all kernels."""
    loads: list[int]
    """The number of loads in the code of each kernel."""


class QueriesAndKeys(nn.Module):
    """Replaces attention: the result are q and k."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Any) -> tuple[Tensor, Tensor]:
        return q, k


class First(nn.Module):
    """Replaces what follows attention: the result is the first argument."""

    def forward(self, y: Any, *others: Any) -> Any:
        return y


def count(architecture: str, width: int, fraction: float, is_packed: bool) -> dict[str, Pass]:
    """What the passes `forward` and `backward` do, in bfloat16, for heads of this width."""
    passes = {}
    for name, graph in trace(architecture, width, fraction, is_packed).items():
        code = write_code(graph, HOPPER)
        kernels = re.findall(r"async_compile\.triton\('\w+', '{3}(.*?)'{3}", code.text, re.S)
        loads = [kernel.count("tl.load(") for kernel in kernels]
        passes[name] = Pass(code.n_bytes, loads)
    return passes


def vector_bytes() -> int:
    """Bytes of q or k."""
    return N_ROWS * LENGTH * D_MODEL * torch.bfloat16.itemsize


def trace(
    architecture: str, width: int, fraction: float, is_packed: bool
) -> dict[str, GraphModule]:
    """The graphs that the compiler of the blocks gets."""
    model_class, module = ARCHITECTURES[architecture]
    n_heads = D_MODEL // width
    model: Any = model_class(
        vocab_size=32,
        context_length=LENGTH,
        n_layers=1,
        n_heads=n_heads,
        d_model=D_MODEL,
        positions=RoPE(fraction),
    )
    block = model.model.blocks[0]
    block.attention = QueriesAndKeys()
    for name in ("output", "W_o", "dropout"):
        setattr(block, name, First())
    graphs: dict[str, GraphModule] = {}
    backend = functools.partial(record_graphs, graphs)
    attend = torch.compile(block.attend, backend=backend, dynamic=False, fullgraph=True)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        RECORDING,
        mock.patch.object(module, "fused_linear", First()),
        mock.patch.object(module, "split_heads", First()),
        mock.patch.object(ngpt, "unit", First()),
    ):
        shape = (N_ROWS, LENGTH, n_heads, width)
        qkv = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        index = torch.empty(N_ROWS, LENGTH, dtype=torch.long) if is_packed else None
        rotation = block.positions.rotation(width, LENGTH, index, qkv[0])
        attend(qkv, None, rotation)
    return graphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--fraction", type=float, nargs="+", default=[0.5])
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    for name, width, fraction in itertools.product(
        options.architecture, options.width, options.fraction
    ):
        for direction, counts in count(name, width, fraction, options.packed).items():
            echo(
                f"{name:5s}  D {width:3d}  fraction {fraction:g}  {direction:8s}: "
                f"{counts.n_bytes / 1e6:.0f} MB, loads {counts.loads}"
            )


if __name__ == "__main__":
    main()

"""Queries, keys and averages between the projections and attention: no pass for a copy."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from anlit import NoPE, RoPE
from anlit.nn.layers.norms import rms
from anlit.nn.layers.positions import Rotation, rotate
from tests.nn.models.tiny import architectures, random_tokens, tiny

LENGTH = 16


@pytest.mark.parametrize("positions", [RoPE(), NoPE()])
@architectures
def test_the_heads_of_a_token_stay_side_by_side_in_memory(architecture, positions) -> None:
    """As the projections have them."""
    model = tiny(architecture, positions=positions)
    inputs: list[tuple[Any, ...]] = []
    attention = model.model.blocks[0].attention
    attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))

    with torch.no_grad():
        model(random_tokens(2, LENGTH))

    ((q, k, _, _),) = inputs
    assert q.transpose(1, 2).is_contiguous()
    assert k.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_gpu_normalises_and_rotates_in_one_kernel(fraction) -> None:
    """The code of a Hopper GPU, written without one."""
    pytest.importorskip("triton")
    from tests.nn.attention.flex_memory import write_code

    def normalise_and_rotate(qkv: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, _ = qkv.split(4, dim=2)
        rotated_q, _ = rotate(Rotation((cos, sin), (cos, sin), width), rms(q, 1e-6, gain), k)
        return rotated_q

    qkv = torch.empty(2, LENGTH, 12, 64, dtype=torch.bfloat16)
    (cos, sin), _, width = RoPE(fraction).rotation(64, LENGTH, None, qkv)  # type: ignore[misc]
    trace = make_fx(normalise_and_rotate, select_decomp_table(), "fake")
    graph = trace(qkv, torch.ones(64), cos, sin)

    code = write_code(graph, 90).text

    assert len(re.findall(r"async_compile\.triton\(", code)) == 1

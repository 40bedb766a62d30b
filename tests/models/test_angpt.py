"""anGPT's block at its initial values keeps the mean norm of unit vectors, map by map, without a norm layer."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from anlit import AnGPT
from anlit.models.angpt import AnGPTBlock
from tests.models.tiny import tiny

D, HEADS, SAMPLES = 512, 8, 200
WIDTHS = [2048, 1536]


@pytest.fixture(scope="module", params=WIDTHS)
def block(request) -> AnGPTBlock:
    return tiny(AnGPT, d_model=D, n_heads=HEADS, d_ff=request.param, n_layers=1).model.blocks[0].requires_grad_(False)


def unit_vectors(width: int) -> Tensor:
    x = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(3))
    return x / x.norm(dim=-1, keepdim=True)


def mean_norm(x: Tensor) -> float:
    return x.norm(dim=-1).mean().item()


def test_queries_keys_and_values_have_norm_one_per_head(block) -> None:
    for layer in (block.W_q, block.W_k, block.W_v):
        for head in layer(unit_vectors(D)).unflatten(-1, (HEADS, -1)).unbind(-2):
            assert mean_norm(head) == pytest.approx(1, abs=0.03)


def test_heads_of_norm_one_come_out_of_w_o_with_norm_one(block) -> None:
    heads = unit_vectors(D).unflatten(-1, (HEADS, -1))
    heads = heads / heads.norm(dim=-1, keepdim=True)
    assert mean_norm(block.W_o(heads.flatten(-2))) == pytest.approx(1, abs=0.03)


def test_maps_into_the_mlp(block) -> None:
    """W_z carries the √d of SiLU(√d·z) too."""
    assert mean_norm(block.W_u(unit_vectors(D))) == pytest.approx(1, abs=0.03)
    assert mean_norm(block.W_z(unit_vectors(D))) == pytest.approx(math.sqrt(D), rel=0.03)


def test_map_out_of_the_mlp_undoes_the_activation(block) -> None:
    d_ff = block.W_d.in_features
    gated = unit_vectors(d_ff) * silu(math.sqrt(D) * unit_vectors(d_ff).flip(0))
    assert mean_norm(block.W_d(gated)) == pytest.approx(1, abs=0.03)


def test_whole_mlp(block) -> None:
    assert mean_norm(block.mlp(unit_vectors(D))) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5])
def test_interpolation_with_an_orthogonal_suggestion(block, alpha) -> None:
    h = unit_vectors(D)
    suggestion = h.roll(1, -1)
    suggestion = suggestion - (suggestion * h).sum(-1, keepdim=True) * h
    suggestion = suggestion / suggestion.norm(dim=-1, keepdim=True)
    mixed = block.interpolate(h, suggestion, torch.full((D,), alpha))
    assert mean_norm(mixed) == pytest.approx(1, abs=1e-3)
    assert mean_norm(mixed - h) > alpha / 2

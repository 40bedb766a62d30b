"""What a mechanism promises: scale invariance, and that a new one is one class."""

import math

import pytest
import torch
from torch import Tensor, nn

from anlit import ScaleInvariant
from anlit.attention.mechanism import Mechanism
from tests.attention.examples import LogN, LogNWithSlopes
from tests.models.tiny import ARCHITECTURES, SIZE, adamw, fit, random_tokens, tiny


def test_scale_invariant_functions() -> None:
    mechanism = ScaleInvariant(tau=10.0)
    t = torch.tensor([0.0, 10.0, 10 * (math.e - 1), 90.0], dtype=torch.float64)
    gains, biases = mechanism.distance_gain(t).tolist(), mechanism.distance_bias(t).tolist()
    assert biases == pytest.approx([0, -2 * math.log(2), -2, -2 * math.log(10)])
    assert gains == pytest.approx([1, math.sqrt(2 * math.log(2) + 1), math.sqrt(3), math.sqrt(2 * math.log(10) + 1)])
    assert mechanism.gain(t) is None


def test_expected_weight_falls_as_one_over_distance() -> None:
    """E exp(a S + m) = √e / (1 + t/τ) for S ~ N(0, 1): every range [t, tΔ) far out has the same total."""
    mechanism, t = ScaleInvariant(tau=10.0), torch.arange(200_000, dtype=torch.float64)
    weight = torch.exp(mechanism.distance_bias(t) + mechanism.distance_gain(t).square() / 2)
    torch.testing.assert_close(weight, math.sqrt(math.e) / (1 + t / 10))
    near, far = weight[1_000:10_000].sum(), weight[10_000:100_000].sum()
    assert near.item() == pytest.approx(far.item(), rel=0.01)


@pytest.mark.parametrize("tau", [0.0, -1.0])
def test_tau_must_be_positive(tau) -> None:
    with pytest.raises(ValueError, match="tau must be positive"):
        ScaleInvariant(tau)


@pytest.mark.parametrize("mechanism", [LogN(), LogNWithSlopes()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_mechanism_is_one_class(architecture, mechanism) -> None:
    """Its parameter is there per layer, at the value it was given, gets a gradient, and a training step moves it."""
    model = tiny(architecture, attention=mechanism, optimizer=adamw(lr=0.01))
    layers = [block.attention.mechanism for block in model.model.blocks]
    assert len(set(map(id, layers))) == SIZE["n_layers"]
    for layer in layers:
        torch.testing.assert_close(layer.strength.detach(), torch.full((SIZE["n_heads"],), 0.4))

    model(random_tokens(2, 12)).square().sum().backward()
    for layer in layers:
        for parameter in layer.parameters():
            assert parameter.grad.abs().min() > 0
    model.zero_grad()

    before = [layer.strength.detach().clone() for layer in layers]
    fit(model, max_steps=2)
    for layer, old in zip(layers, before, strict=True):
        assert (layer.strength - old).abs().min() > 1e-3


@pytest.mark.parametrize("name", ["head_weight", "head_gain", "head_scale"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mechanism_may_call_its_parameter_anything(architecture, name) -> None:
    """Initial values and constraints of the network's matrices and gains are not for a mechanism's own parameters."""

    class Named(Mechanism):
        def for_layer(self, n_heads: int, d_head: int, layer: int) -> Mechanism:
            mechanism = Named()
            mechanism.register_parameter(name, nn.Parameter(torch.full((n_heads,), 3.0)))
            return mechanism

        def gain(self, n: Tensor) -> Tensor:
            return getattr(self, name)[:, None] * n.log()

    model = tiny(architecture, attention=Named()).model
    model.restore_norms()
    assert getattr(model.blocks[1].attention.mechanism, name).tolist() == [3.0] * SIZE["n_heads"]

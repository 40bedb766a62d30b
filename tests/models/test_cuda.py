"""On a CUDA device: the same numbers as on CPU, and a bf16 run through the Trainer. Skips itself elsewhere."""

import pytest
import torch

from anlit import Plain, ScaleInvariant
from tests.models.tiny import ARCHITECTURES, SIZE, fit, random_tokens, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mechanism", [Plain(), ScaleInvariant()], ids=lambda mechanism: type(mechanism).__name__)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_equals_cpu_in_float64(architecture, mechanism) -> None:
    model = tiny(architecture, attention=mechanism).double()
    tokens, ids = random_tokens(2, 12), torch.tensor([[0] * 5 + [1] * 7] * 2)
    expected = model(tokens, ids)
    expected.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.cuda()
    actual = model(tokens.cuda(), ids.cuda())
    actual.square().sum().backward()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-9, atol=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), gradients[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_run_keeps_the_constraint(architecture) -> None:
    model = tiny(architecture)
    fit(model, max_steps=3, accelerator="gpu", precision="bf16-mixed")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for norms in model.model.row_norms():
        assert norms.max() <= 1 + 1e-5
    assert model(random_tokens(1, SIZE["context_length"]).to(model.device)).isfinite().all()

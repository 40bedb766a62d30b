"""Where gradients written by hand are taken.

tests/parity compares them with formulas. models/test_runtime.py compares them with the gradients of
compilers and GPUs.
"""

import torch

from anlit.nn.layers import norms
from anlit.nn.layers.cpu_gradients import is_trained_eagerly_on_cpu


def test_a_zero_vector_stays_zero_and_half_precision_is_kept() -> None:
    zeros = torch.zeros(2, 4)
    assert torch.equal(norms.unit(zeros), zeros)

    x = torch.full((2, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    y = norms.rms(x, 1e-6, torch.ones(4))
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_compilers_inference_and_other_devices_get_the_formula() -> None:
    x = torch.ones(2, requires_grad=True)
    on_other_device = torch.ones(2, device="meta", requires_grad=True)
    compiled = torch.compile(is_trained_eagerly_on_cpu, backend="eager")

    assert is_trained_eagerly_on_cpu(x)
    assert not compiled(x)
    assert not is_trained_eagerly_on_cpu(x.detach() + 1)
    assert not is_trained_eagerly_on_cpu(on_other_device)

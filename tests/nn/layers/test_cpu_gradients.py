"""Where gradients written by hand are taken.

That they are right is in tests/parity, that the formulas of compilers and GPUs are the same in
models/test_runtime.py.
"""

import torch

from anlit.nn.layers import norms
from anlit.nn.layers.cpu_gradients import is_trained_eagerly_on_cpu


def test_a_zero_vector_stays_zero_and_half_precision_is_kept() -> None:
    assert torch.equal(norms.unit(torch.zeros(2, 4)), torch.zeros(2, 4))
    x = torch.full((2, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    norms.rms(x, 1e-6, torch.ones(4)).sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_compilers_inference_and_other_devices_get_the_formula() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: seen.append(is_trained_eagerly_on_cpu(x)) or x + 1, backend="eager")(x)
    assert seen == [False]
    assert is_trained_eagerly_on_cpu(x)
    with torch.no_grad():
        assert not is_trained_eagerly_on_cpu(x + 1)
    assert not is_trained_eagerly_on_cpu(torch.ones(2, device="meta", requires_grad=True))

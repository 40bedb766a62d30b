"""Scaling vectors and the maps that carry them."""

import pytest
import torch

from anlit.layers.scaling import ScalingVector


@pytest.mark.parametrize(("init", "scale"), [(0.05, 0.03), (10.0, 1.0), (1.0, 0.001)])
def test_starts_at_init_and_stores_scale(init, scale) -> None:
    vector = ScalingVector(5, init, scale)
    torch.testing.assert_close(vector().detach(), torch.full((5,), init))
    torch.testing.assert_close(vector.stored.detach(), torch.full((5,), scale))
    with torch.no_grad():
        vector.stored.normal_()
    vector.reset_parameters()
    torch.testing.assert_close(vector().detach(), torch.full((5,), init))


@pytest.mark.parametrize(("init", "scale"), [(0.05, 0.03), (10.0, 1.0), (1.0, 0.02)])
def test_a_step_of_adam_moves_it_by_lr_times_init_over_scale(init, scale) -> None:
    vector, lr = ScalingVector(4, init, scale), 1e-3
    optimizer = torch.optim.Adam(vector.parameters(), lr=lr)
    (vector() * torch.tensor([3.0, -0.2, 50.0, -1.0])).sum().backward()
    before = vector().detach()
    optimizer.step()
    signs = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    torch.testing.assert_close(vector().detach() - before, signs * lr * init / scale, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_scale_must_be_positive(scale) -> None:
    with pytest.raises(ValueError, match="scale"):
        ScalingVector(3, 1.0, scale)

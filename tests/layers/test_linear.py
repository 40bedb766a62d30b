"""Linear maps with factors, one by one and fused, and scaling vectors."""

import pytest
import torch

from anlit.layers.scaling import ScalingVector


@pytest.mark.parametrize(("init", "scale"), [(0.05, 0.03), (10.0, 1.0)])
def test_a_scaling_vector_starts_at_init_and_adam_moves_it_by_lr_times_init_over_scale(init, scale) -> None:
    vector, lr = ScalingVector(4, init, scale), 1e-3
    before = vector().detach()
    torch.testing.assert_close(before, torch.full((4,), init))
    (vector() * torch.tensor([3.0, -0.2, 50.0, -1.0])).sum().backward()
    torch.optim.Adam(vector.parameters(), lr=lr).step()
    signs = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    torch.testing.assert_close(vector().detach() - before, signs * lr * init / scale, rtol=1e-3, atol=0)
    vector.reset_parameters()
    assert torch.equal(vector().detach(), before)

"""Memory in which a kernel that reads what nobody wrote finds NaN."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.ones(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)

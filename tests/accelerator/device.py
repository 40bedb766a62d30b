"""A device that is not the CPU and does not exist, registered from Python, for tensors that are fake: they have a
shape, a type and a device, and no numbers.

So an operation on tensors of two devices fails as it would on a GPU, and whatever has to know a number is seen:
`.item()`, `nonzero`, a condition, each of which waits for a GPU. Needs a process of its own, for a device cannot be
removed.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import flex_attention
from torch.utils import backend_registration

from anlit.attention.backends import BACKENDS

NAME = "imaginary"
CAN_REGISTER = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can register a device from Python."""


def register() -> torch.device:
    """Make the device known, and let the kernels that are written for CUDA have it: of them only the shapes run."""

    class DeviceModule(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    for name in ("flash", "triton", "flex"):
        of_any_device = BACKENDS[name].unsupported_reason
        BACKENDS[name].unsupported_reason = _without_queries(of_any_device)  # type: ignore[attr-defined]
    flex_attention._validate_device = lambda *tensors: None  # type: ignore[attr-defined]
    return torch.device(NAME, 0)


def _without_queries(unsupported_reason: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda mechanism, q=None: unsupported_reason(mechanism)


def on_device(module: torch.nn.Module) -> None:
    """Give a module fake parameters on the device, under FakeTensorMode."""
    module._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=NAME))

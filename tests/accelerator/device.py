"""A device that does not exist, registered from Python, for tensors that are fake: they have no numbers.

So an operation on tensors of two devices fails as it would on a GPU, and whatever has to know a number is seen, which
waits for a GPU. Needs a process of its own, for a device cannot be removed.
"""

import torch
from torch.nn.attention import flex_attention
from torch.utils import backend_registration

from anlit.nn.kernels import KERNELS

NAME = "imaginary"
CAN_REGISTER = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can register a device from Python."""


def register() -> None:
    """Make the device known, and let the kernels that are written for CUDA have it: of them only the shapes run."""

    class DeviceModule(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=DeviceModule()
    )
    for name in ("flash", "triton", "flex"):
        reason = KERNELS[name].unsupported_reason
        KERNELS[name].unsupported_reason = lambda m, q=None, reason=reason: reason(m)  # type: ignore[attr-defined]
    flex_attention._validate_device = lambda *tensors: None  # type: ignore[attr-defined]


def on_device(module: torch.nn.Module) -> None:
    """Give a module fake parameters on the device, under FakeTensorMode."""
    module._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=NAME))

"""A device that does not exist, registered from Python, for fake tensors, which have no numbers.

So an operation on tensors of two devices fails as on a GPU. An operation that needs a number, which
waits for a GPU, is noticed. Use it in a separate process, because a device cannot be removed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.utils import backend_registration

from anlit.nn.kernels import KERNELS
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.training.devices import DEVICE_TYPES

NAME = "imaginary"
CAN_REGISTER = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this torch can register a device from Python."""


def register() -> None:
    """Register the device, and let the kernels for CUDA accept it: only their shapes run."""

    class DeviceModule(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def manual_seed(self, seed: int) -> None:
            """For runs with a seed, which an earlier test may leave in the environment."""

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=DeviceModule()
    )
    for name in ("flash", "triton", "flex"):
        KERNELS[name].unsupported_reason = partial(  # type: ignore[attr-defined]
            _reason_on_any_device, KERNELS[name].unsupported_reason
        )
    DEVICE_TYPES.append(NAME)
    flex_attention._validate_device = lambda *tensors: None  # type: ignore[attr-defined]


def _reason_on_any_device(
    unsupported_reason: Callable[..., str | None], mechanism: Mechanism, q: Any = None
) -> str | None:
    """The reason without an example of queries, so without their device."""
    return unsupported_reason(mechanism)


def on_device(module: torch.nn.Module) -> None:
    """Give a module fake parameters on the device, under FakeTensorMode."""
    module._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=NAME))

"""The types of devices that anlit computes on."""

from anlit.errors import UserError

DEVICE_TYPES = ["cpu", "cuda"]
"""torch's names. AMD's GPUs are `cuda` too."""


def check_device_type(setting: str, device_type: str) -> None:
    """Raise UserError if a setting leads to a device of another type, such as Apple's `mps`.

    Such a device may have no float64, in which losses are added up, and its steps are not timed.
    """
    if device_type not in DEVICE_TYPES:
        raise UserError(
            f"{setting} leads to a device of the type {device_type}, and anlit computes on CPU and "
            f"CUDA GPUs: set {setting} cpu"
        )

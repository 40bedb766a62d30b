"""What was chosen for each kind of attention, and which layer takes what."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from anlit.attention.choice.kind import Kind, name_of
from anlit.reporting.provenance import processor_name


@dataclass(frozen=True)
class Choice:
    """What one kind of attention runs on.

    Args:
        kind: Of the inputs.
        backend: The name.
        because: How it came about.
        seconds: Forward and backward pass of a layer by back end, of those that were timed.
        left_out: By back end, why it was not timed: it was wrong, failed or hung.
    """

    kind: Kind
    backend: str
    because: str
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_plain(self) -> dict[str, Any]:
        """For JSON and checkpoints."""
        rest = {"backend": self.backend, "because": self.because, "seconds": self.seconds, "left_out": self.left_out}
        return {**self.kind.as_plain(), **rest}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Choice":
        """Raises KeyError, TypeError or ValueError where something is missing, unknown or of another type."""
        rest = dict(plain)
        own = {name: rest.pop(name) for name in ("backend", "because", "seconds", "left_out")}
        for value, expected in zip(own.values(), (str, str, dict, dict), strict=True):
            if not isinstance(value, expected):
                raise TypeError(f"{value!r} is no {expected.__name__}")
        return cls(Kind.from_plain(rest), **own)

    def __str__(self) -> str:
        others = sorted((time, name) for name, time in self.seconds.items() if name != self.backend)
        mine = self.seconds.get(self.backend)
        took = f", {_ms(mine)} a layer ({'; '.join(f'{name} {_ms(time)}' for time, name in others)})" if mine else ""
        return f"attention {self.kind.mechanism} runs on '{self.backend}' ({self.kind.size}): {self.because}{took}"


@dataclass(frozen=True)
class Choices:
    """The choices of a run, for the device that they were made on."""

    device: str
    made: tuple[Choice, ...]

    def nearest(self, mechanism: str, dtype: torch.dtype, length: int, is_packed: bool) -> list[Choice]:
        """The choices for this mechanism, first for the inputs most like these.

        So validation, and lengths that were not tried, are computed by what training is computed by.
        """

        def difference(choice: Choice) -> tuple[bool, bool, float]:
            kind = choice.kind
            others = kind.dtype != name_of(dtype), (kind.document is not None) != is_packed
            return *others, abs(math.log(kind.length / length))

        return sorted((choice for choice in self.made if choice.kind.mechanism == mechanism), key=difference)

    def as_plain(self) -> dict[str, Any]:
        return {"device": self.device, "kinds": [choice.as_plain() for choice in self.made]}

    @classmethod
    def from_plain(cls, plain: Any) -> "Choices | None":
        """None if `plain` is no table of choices, or one of another version."""
        try:
            return cls(plain["device"], tuple(Choice.from_plain(one) for one in plain["kinds"]))
        except (KeyError, TypeError, AttributeError, ValueError):
            return None


def device_label(device: torch.device) -> str:
    """The GPU's or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else device.type


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"

"""Which back end `backend: auto` selected for each kind of attention in a run.

`anlit.attention.trial` makes selections on a GPU, `anlit.models.kernel_selection` asks for them at the first batch.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from anlit.attention.backends import BackendName
from anlit.attention.coefficient import Coefficient, Reference
from anlit.attention.mechanism import Mechanism
from anlit.reporting.provenance import processor_name
from anlit.settings import build_from_plain


@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention in a run: queries (`rows`, `heads`, `length`, `width`), `key_heads` heads of keys.

    Two of them are equal if one selection serves both: rows, documents and compilation may differ.
    """

    mechanism: str  # see `mechanism_name`
    rows: int = field(compare=False)
    heads: int
    key_heads: int
    length: int
    width: int
    dtype: str  # of q, k and v, such as `bfloat16`
    document: int | None = field(compare=False)
    """The mean length of packed documents in tokens; None if none are masked."""
    compiled: bool = field(compare=False)

    def __str__(self) -> str:
        packed = "" if self.document is None else f" in documents of about {self.document}"
        return f"{self.mechanism} ({self.dtype}, {self.rows} × {self.length} tokens{packed})"


@dataclass(frozen=True)
class Selection:
    """What one kind of attention runs on, and what was found out about each back end that was tried.

    That is the `seconds` of a layer's forward and backward pass, what is `wrong` with its results, or why it `failed`:
    the next start tries it again.
    """

    spec: AttentionSpec
    backend: BackendName
    seconds: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        own = (
            f"{1e3 * self.seconds[self.backend]:.3g} ms a layer"
            if self.backend in self.seconds
            else "the default"
        )
        parts = [f"attention {self.spec} runs on '{self.backend}', {own}"]
        parts += [
            f"{name} {1e3 * s:.3g} ms" for name, s in self.seconds.items() if name != self.backend
        ]
        parts += [f"'{name}' is wrong ({reason})" for name, reason in self.wrong.items()]
        parts += [
            f"'{name}' is tried again at the next start ({reason})"
            for name, reason in self.failed.items()
        ]
        return "; ".join(parts)


@dataclass(frozen=True)
class Selections:
    """The selections of a run, for the device that they were made on."""

    device: str
    made: list[Selection]

    def nearest(self, mechanism: str, length: int) -> list[BackendName]:
        """The back ends selected for this mechanism, those for the most similar length of sequences first."""
        made = [selection for selection in self.made if selection.spec.mechanism == mechanism]
        made.sort(key=lambda selection: abs(math.log2(max(1, selection.spec.length) / length)))
        return [selection.backend for selection in made]

    def final(self) -> dict[str, Any] | None:
        """Those for which every candidate was tried, as a checkpoint keeps them; None if there are none."""
        made = [selection for selection in self.made if selection.seconds and not selection.failed]
        return asdict(Selections(self.device, made)) if made else None

    @classmethod
    def from_plain(cls, plain: Any) -> "Selections | None":
        """The inverse of `asdict`; None if `plain` is no table of selections, or one of another version."""
        try:
            return build_from_plain(cls, plain, "attention")
        except (TypeError, ValueError):
            return None


def mechanism_name(mechanism: Mechanism) -> str:
    """The class, the window, and what is learned: `SlidingWindow(window 128, ScaleInvariant(strength per_layer))`.

    The values of coefficients are left out, because no kernel's speed depends on them.
    """
    parts = [f"window {mechanism.window}"] if mechanism.window is not None else []
    for name, part in mechanism.named_children():
        coefficient = part.coefficient if isinstance(part, Reference) else part
        if isinstance(part, Mechanism):
            parts.append(mechanism_name(part))
        elif isinstance(coefficient, Coefficient) and coefficient.learned != "never":
            parts.append(f"{name} {coefficient.learned}")
    return type(mechanism).__name__ + (f"({', '.join(parts)})" if parts else "")


def device_label(device: torch.device) -> str:
    """The GPU's or the processor's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()

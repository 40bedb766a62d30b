"""Which back end `backend: auto` selected for each kind of attention in a run.

`anlit.attention.trial` makes selections on a GPU, `anlit.models.kernel_selection` asks for them at the first batch.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from anlit.attention.coefficient import Coefficient, Reference
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.reporting.provenance import processor_name
from anlit.settings import build_from_plain


@dataclass(frozen=True)
class AttentionSpec:
    """One kind of attention in a run: queries (`rows`, `heads`, `length`, `width`), `key_heads` heads of keys."""

    mechanism: str
    """Its class and window, and which coefficients are learned; see `mechanism_name`."""
    rows: int
    heads: int
    key_heads: int
    length: int
    width: int
    dtype: str
    """The precision of q, k and v, such as `bfloat16`."""
    document: int | None
    """The mean length of packed documents in tokens, rounded to a power of 2; None if none are masked."""
    compiled: bool
    """Whether it runs inside of blocks that are compiled."""

    @property
    def is_packed(self) -> bool:
        return self.document is not None

    @property
    def inputs(self) -> tuple[str, str, bool, int]:
        """What a selection holds for."""
        return self.mechanism, self.dtype, self.is_packed, self.length

    def __str__(self) -> str:
        packed = f" in documents of about {self.document}" if self.is_packed else ""
        return f"{self.mechanism} ({self.dtype}, {self.rows} × {self.length} tokens{packed})"


@dataclass(frozen=True)
class Selection:
    """What one kind of attention runs on, and what was found out about each back end that was tried."""

    spec: AttentionSpec
    backend: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Forward and backward pass of a layer."""
    wrong: dict[str, str] = field(default_factory=dict)
    """What is wrong with its results."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why it could not be tried. The next start tries it again."""

    @property
    def is_final(self) -> bool:
        """Whether every candidate was tried, so that a checkpoint may keep it."""
        return bool(self.seconds) and not self.failed

    def __str__(self) -> str:
        others = sorted((seconds, name) for name, seconds in self.seconds.items() if name != self.backend)
        times = "; ".join(f"{name} {1e3 * seconds:.3g} ms" for seconds, name in others)
        own = f"{1e3 * self.seconds[self.backend]:.3g} ms a layer" if self.backend in self.seconds else "the default"
        parts = [f"attention {self.spec} runs on '{self.backend}', {own}", *([times] if times else [])]
        parts += [f"'{name}' is wrong ({reason})" for name, reason in self.wrong.items()]
        parts += [f"'{name}' is tried again at the next start ({reason})" for name, reason in self.failed.items()]
        return "; ".join(parts)


@dataclass(frozen=True)
class Selections:
    """The selections of a run, for the device that they were made on."""

    device: str
    made: tuple[Selection, ...]

    def nearest(self, mechanism: str, dtype: str, is_packed: bool, length: int) -> list[Selection]:
        """Those for this mechanism, the inputs most like these first: validation takes what training takes."""

        def difference(selection: Selection) -> tuple[bool, bool, float]:
            spec = selection.spec
            return spec.dtype != dtype, spec.is_packed != is_packed, abs(math.log2(max(1, spec.length) / length))

        return sorted((each for each in self.made if each.spec.mechanism == mechanism), key=difference)

    def of(self, spec: AttentionSpec) -> Selection | None:
        """The selection for this mechanism and these inputs, None if there is none. Batch and documents may differ."""
        return next((each for each in self.nearest(*spec.inputs)[:1] if each.spec.inputs == spec.inputs), None)

    def final(self) -> "Selections | None":
        """Those for which every candidate was tried; None if there are none."""
        made = tuple(selection for selection in self.made if selection.is_final)
        return Selections(self.device, made) if made else None

    def as_plain(self) -> dict[str, Any]:
        return {"device": self.device, "made": [asdict(selection) for selection in self.made]}

    @classmethod
    def from_plain(cls, plain: Any) -> "Selections | None":
        """None if `plain` is no table of selections, or one of another version."""
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
        if isinstance(part, Mechanism):
            parts.append(mechanism_name(part))
        elif isinstance(coefficient := part.coefficient if isinstance(part, Reference) else part, Coefficient):
            parts += [f"{name} {coefficient.learned}"] if coefficient.learned != "never" else []
    kind = type(mechanism)
    label = kind.__name__ if kind.__module__.startswith("anlit.") else f"{kind.__module__}.{kind.__name__}"
    return f"{label}({', '.join(parts)})" if parts else label


def mean_document(documents: Documents, rows: int) -> int | None:
    """Mean tokens of the documents in a batch of `rows`, to a power of 2, at most T; None if none are masked."""
    if not documents.are_masked:
        return None
    mean = rows * documents.length / max(1, len(documents.cu_seqlens) - 1)
    return int(min(documents.length, 2 ** round(math.log2(max(1.0, mean)))))


def device_label(device: torch.device) -> str:
    """The GPU's or the processor's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name() if device.type == "cpu" else device.type


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What the choice of a back end depends on."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from anlit.attention.coefficient import Coefficient, Reference
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism


@dataclass(frozen=True)
class Kind:
    """Attention of one kind: whatever has the same is computed by the same back end.

    Args:
        mechanism: Its class and window, and which coefficients are learned; see `form_of`.
        rows: B, sequences in a batch.
        heads: H, heads of queries.
        key_heads: G, heads of keys and values.
        length: T.
        width: D.
        dtype: The precision of q, k and v, such as `bfloat16`.
        document: The mean length of packed documents in tokens, rounded to a power of 2; None if none are masked.
        dropout: The share of weights that is dropped.
        compiled: Whether it runs inside of blocks that are compiled for a GPU.
    """

    mechanism: str
    rows: int
    heads: int
    key_heads: int
    length: int
    width: int
    dtype: str
    document: int | None
    dropout: float
    compiled: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def size(self) -> str:
        """For a line in the log."""
        packed = "one document" if self.document is None else f"documents of about {self.document}"
        return f"{self.dtype}, {self.rows} × {self.length} tokens, {packed}"

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "Kind":
        """Raises TypeError or ValueError where something is missing, unknown or of another type."""
        kind = cls(**plain)
        sizes = (kind.rows, kind.heads, kind.key_heads, kind.length, kind.width)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"{sizes} are no sizes")
        if not all(isinstance(text, str) for text in (kind.mechanism, kind.dtype)):
            raise TypeError("a mechanism and a dtype are names")
        return kind


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form_of(mechanism: Mechanism) -> str:
    """The class, the window, and what is learned: `SlidingWindow(window 128, ScaleInvariant(strength per_layer))`.

    The values of coefficients are left out, because no kernel's speed depends on them.
    """
    parts = [f"window {mechanism.window}"] if mechanism.window is not None else []
    for name, part in mechanism.named_children():
        if isinstance(part, Mechanism):
            parts.append(form_of(part))
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


def like_queries(kind: Kind, device: torch.device) -> Tensor:
    """An empty q in training, for the reasons that back ends may have against it."""
    shape = (1, kind.heads, kind.length, kind.width)
    return torch.empty(shape, dtype=kind.torch_dtype, device=device, requires_grad=True)

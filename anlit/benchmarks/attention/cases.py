"""What `anlit benchmark attention` measures: mechanisms, kernels, shapes, and the presets made of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from anlit.attention.backends import BACKENDS
from anlit.attention.backends.flex import block_mask
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.alibi import ALiBi
from anlit.attention.mechanisms.log_bias import LogBias
from anlit.attention.mechanisms.log_n import LogN
from anlit.attention.mechanisms.plain import Plain
from anlit.attention.mechanisms.scale_invariant import ScaleInvariant
from anlit.attention.mechanisms.sliding_window import SlidingWindow

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]

MECHANISMS: dict[str, Mechanism] = {
    "plain": Plain(),
    "log-n": LogN(learned="never"),
    "scale-invariant": ScaleInvariant(),
    "scale-invariant-learned": ScaleInvariant(learned="per_layer"),
    "log-bias": LogBias(),
    "alibi": ALiBi(),
    "window": SlidingWindow(1024),
    "window-scale-invariant": SlidingWindow(1024, ScaleInvariant()),
}


@dataclass(frozen=True)
class Entrant:
    """A mechanism and what computes it."""

    mechanism: str
    kernel: str

    @property
    def label(self) -> str:
        return f"{self.mechanism}, {self.kernel}"


@dataclass(frozen=True)
class Shape:
    """The tensors that all entrants get: batch × heads × length × width."""

    width: int
    length: int
    documents: bool
    heads: int
    batch: int

    @property
    def label(self) -> str:
        return f"D {self.width}, T {self.length}, {'documents' if self.documents else 'dense'}"


@dataclass(frozen=True)
class Plan:
    """A preset.

    Args:
        entrants: Each as `mechanism, kernel`.
        widths: D.
        lengths: T.
        tokens: B·T at least; one sequence where T is more.
        d_model: H·D.
        dtype: Of q, k, v.
        rounds: How often the entrants take turns.
    """

    entrants: tuple[Entrant, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    d_model: int
    dtype: torch.dtype
    rounds: int

    def shapes(self) -> list[Shape]:
        """The shapes from the shortest to the longest, so that a time limit leaves out the longest."""
        return [
            Shape(width, length, documents, max(1, self.d_model // width), max(1, self.tokens // length))
            for length in self.lengths
            for width in self.widths
            for documents in (False, True)
        ]


def entrants(*labels: str) -> tuple[Entrant, ...]:
    """From `mechanism, kernel`."""
    return tuple(Entrant(*(part.strip() for part in label.split(","))) for label in labels)


PRESETS = {
    "h200": Plan(
        entrants("plain, flash", "plain, sdpa-cudnn", "plain, triton", "log-n, flash", "scale-invariant, flex",
                 "scale-invariant, flex-formula", "scale-invariant, triton", "scale-invariant-learned, triton"),
        (64, 128), (2048, 4096, 16384, 65536), 16384, 2048, torch.bfloat16, 10,
    ),
    "cpu": Plan(
        entrants("plain, sdpa", "plain, blockwise", "plain, eager", "alibi, sdpa", "alibi, blockwise",
                 "scale-invariant, blockwise", "scale-invariant, eager"),
        (64,), (256, 1024, 4096), 4096, 128, torch.float32, 7,
    ),
}  # fmt: skip


def kernel(name: str) -> Attend:
    """What computes it: a back end, or one of the ways to use PyTorch that are here for comparison only."""
    attend: Attend = COMPARED[name] if name in COMPARED else BACKENDS[name].attend
    return attend


def reason_against(entrant: Entrant, mechanism: Mechanism, q: Tensor, documents: bool) -> str | None:
    """Why this entrant cannot take part."""
    if entrant.kernel == "flex-formula":
        formula = isinstance(mechanism, ScaleInvariant) and mechanism.learned == "never"
        return BACKENDS["flex"].reason_against(mechanism, q) if formula else "only for scale-invariant"
    if entrant.kernel == "sdpa-cudnn":
        trivial = isinstance(mechanism, Plain) and not documents and q.device.type == "cuda"
        return None if trivial else "only plain, dense, on CUDA"
    reason: str | None = BACKENDS[entrant.kernel].reason_against(mechanism, q)
    return reason


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _by_formula(q: Tensor, k: Tensor, v: Tensor, tau: float, c: float, visible: BlockMask) -> Tensor:
    """As [SI] ran it: the logarithm and the root are computed for every score."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        far = torch.log1p((i - j).clamp(min=0).float() / tau)
        return s * torch.sqrt(2 * far + 1) - c * far

    return flex_attention(q, k, v, score_mod=score, block_mask=visible)  # type: ignore[return-value]


def _flex_formula(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    assert isinstance(mechanism, ScaleInvariant)
    run = torch.compile(_by_formula, dynamic=False)
    return run(q, k, v, mechanism.tau, mechanism.c, block_mask(documents, None))


COMPARED: dict[str, Attend] = {
    "flex-formula": _flex_formula,
    "sdpa-cudnn": _cudnn,
}

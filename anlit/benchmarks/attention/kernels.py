"""The mechanisms and kernels that `anlit benchmark attention` puts beside each other."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from anlit.attention.backends import BACKENDS
from anlit.attention.backends.flex import block_mask
from anlit.attention.choice.inputs import Attend
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.alibi import ALiBi
from anlit.attention.mechanisms.log_bias import LogBias
from anlit.attention.mechanisms.log_n import LogN
from anlit.attention.mechanisms.plain import Plain
from anlit.attention.mechanisms.scale_invariant import ScaleInvariant
from anlit.attention.mechanisms.sliding_window import SlidingWindow

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


def attend_by(name: str) -> Attend:
    """What computes it: a back end, or one of the ways to use PyTorch that are here for comparison only."""
    attend: Attend = COMPARED[name] if name in COMPARED else BACKENDS[name].attend
    return attend


def reason_against(kernel: str, mechanism: Mechanism, q: Tensor, documents: bool) -> str | None:
    """Why a kernel cannot take part."""
    if kernel == "flex-formula":
        formula = isinstance(mechanism, ScaleInvariant) and mechanism.learned == "never"
        return BACKENDS["flex"].reason_against(mechanism, q) if formula else "only for scale-invariant"
    if kernel == "sdpa-cudnn":
        trivial = isinstance(mechanism, Plain) and not documents and q.device.type == "cuda"
        return None if trivial else "only plain, dense, on CUDA"
    reason: str | None = BACKENDS[kernel].reason_against(mechanism, q)
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

"""PyTorch's scaled_dot_product_attention: fused kernels for every mechanism whose a(t) is 1."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from anlit.nn.kernels import eager
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import (
    distance_tables,
    distances,
    first_key,
    masked_bias,
    tables_are_learned,
    with_gain,
)
from anlit.nn.kernels.grouped_heads import repeat_kv
from anlit.nn.kernels.launch_limits import (
    MOST_SEQUENCES,
    flash_gradient_is_too_large,
    too_many_sequences,
)
from anlit.nn.mechanisms.mechanism import Mechanism

SHORTEST_MEAN = 32
"""Mean tokens of a document from which on a call for each is faster than a masked call for all.

On 2 CPU cores, H 4, D 32: 0.6 × its speed at 8 tokens, 1.4 × at 32, 4.5 × at 256."""

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The order without a gradient. For each new number of keys cuDNN would build a plan, in half a
second on a B200 (FunASR issue 3704). A generated text has a new number for each token."""

WITHOUT_LIMIT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The order for batches beyond `launch_limits.py`. PyTorch splits them for its first kernel."""

PRIORITY = [SDPBackend.CUDNN_ATTENTION, *WITHOUT_CUDNN]
"""The order in training without a mask. cuDNN's kernel is the fastest (docs/results/gpu.md)."""

CUDNN_GENERATIONS = (9, 10)
"""Major compute capabilities where PyTorch prefers cuDNN's kernel: Hopper and Blackwell for data
centres. On a workstation's Blackwell (12) it was slower (transformers PR 48163)."""


def unsupported_reason(mechanism: Mechanism, q: Tensor | None = None) -> str | None:
    """Return a reason against a mechanism with an a(t), and against no device."""
    if mechanism.scales_with_distance:
        return "its gain a(t) changes logits by distance, which scaled_dot_product_attention cannot"
    return None


def batch_limit(
    mechanism: Mechanism, q: Tensor, documents: Documents, n_rows: int, dropout: float
) -> str | None:
    """Return a reason against very many rows on a GPU, if weights are dropped or m(t) is learned.

    PyTorch's kernel for so many rows (`WITHOUT_LIMIT`) then raises.
    """
    reason = too_many_sequences(n_rows)
    if q.device.type != "cuda" or reason is None:
        return None
    if dropout:
        return f"{reason}, with dropout"
    if q.requires_grad and tables_are_learned(mechanism):
        return f"{reason}, if m(t) is learned"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: Mechanism, documents: Documents, dropout: float
) -> Tensor:
    """softmax(g·S + m) v.

    g multiplies q. m, the window and documents go into an additive mask for 512 queries at a time.
    A single document on a CPU has a T × T mask. That is faster. On a CPU, long packed documents are
    computed one by one. On other devices keys of earlier documents are masked, because reading the
    lengths would wait. `flash` and `triton` skip them.
    """
    window = mechanism.window
    is_on_cpu = q.device.type == "cpu"
    q = with_gain(q, mechanism, documents)
    _, m = distance_tables(mechanism, q.shape[-2], q)
    if documents.are_masked:
        if is_on_cpu and _are_long(documents):
            return _attend_documents(q, k, v, m, window, documents, dropout)
    elif is_on_cpu or (m is None and window is None):
        bias = _document_bias(m, window, q.shape[-2], q)
        return _attend_whole_rows(q, k, v, bias, dropout)
    attend_block = partial(_attend_block, documents=documents, window=window, dropout=dropout)
    return eager.by_blocks(attend_block, q, k, v, m)


def _attend_block(
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor | None,
    documents: Documents,
    window: int | None,
    dropout: float,
) -> Tensor:
    """Attention of queries q, which begin at number `first`."""
    begin = first_key(first, window)
    end = first + q.shape[-2]
    t = distances(q.shape[-2], end - begin, q.device)
    mask = masked_bias(m, t, documents, window, first, q.dtype)
    return fused(q, k[..., begin:end, :], v[..., begin:end, :], mask, dropout)


def _attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    m: Tensor | None,
    window: int | None,
    documents: Documents,
    dropout: float,
) -> Tensor:
    """Attention with a call for each document."""
    lengths = documents.cu_seqlens.diff().tolist()
    bias = _document_bias(m, window, max(lengths), q)
    q_by_document = _split_documents(q, lengths)
    k_by_document = _split_documents(k, lengths)
    v_by_document = _split_documents(v, lengths)
    outputs = []
    for document in zip(q_by_document, k_by_document, v_by_document, strict=True):
        output = _attend_whole_rows(*document, bias, dropout)  # (1, H, length, D)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).unflatten(0, (-1, documents.length)).transpose(1, 2)


def _split_documents(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """(B, H, T, D) → a (1, H, length, D) for each document."""
    flat = x.transpose(0, 1).flatten(1, 2)
    return [document[None] for document in flat.split(lengths, 1)]


def _are_long(documents: Documents) -> bool:
    """Whether a call for each document is faster.

    Not in compiled code, which would be made again for each batch.
    """
    if torch.compiler.is_compiling():
        return False
    return documents.cu_seqlens[-1].item() >= SHORTEST_MEAN * (len(documents.cu_seqlens) - 1)


def _document_bias(
    m: Tensor | None, window: int | None, length: int, like: Tensor
) -> Tensor | None:
    """The bias and mask of one document's logits, (1, H or 1, length, length).

    None if the causal mask is enough.
    """
    if m is None and (window is None or window >= length):
        return None
    document = Documents(None, length, like.device)
    return masked_bias(m, distances(length, length, like.device), document, window, 0, like.dtype)


def _attend_whole_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float
) -> Tensor:
    """Attention of rows (B, H, T, D) of one document each, with `bias` cut to T × T."""
    mask = None if bias is None else bias[..., : q.shape[-2], : q.shape[-2]]
    return fused(q, k, v, mask, dropout, is_causal=mask is None)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's kernel for q (B, H, T, D), k and v (B, G, K, D).

    Keys and values are copied for all heads if the kernel needs that.
    """
    if not reads_groups(q, mask):
        k = repeat_kv(k, q.shape[1])
        v = repeat_kv(v, q.shape[1])
    is_grouped = k.shape[1] != q.shape[1]
    order = order_of_kernels(q, mask)
    with nullcontext() if order is None else sdpa_kernel(order, set_priority=True):
        return scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal, enable_gqa=is_grouped
        )


def order_of_kernels(q: Tensor, mask: Tensor | None) -> list[SDPBackend] | None:
    """The order in which PyTorch tries its kernels; None for its own.

    Its own order begins with cuDNN's on `CUDNN_GENERATIONS`, and with flash attention on others.
    """
    if q.is_cuda and _exceeds_limits(q):
        return WITHOUT_LIMIT
    if not q.is_cuda or gpu_generation() not in CUDNN_GENERATIONS:
        return None
    if not q.requires_grad:
        return WITHOUT_CUDNN
    return PRIORITY if mask is None else None


def _exceeds_limits(q: Tensor) -> bool:
    """Whether q (B, H, T, D) are too many rows for cuDNN's kernel and flash attention."""
    n_rows, n_heads, length, width = q.shape
    is_too_large = flash_gradient_is_too_large(n_rows, n_rows * length, n_heads, width)
    return n_rows > MOST_SEQUENCES or (q.requires_grad and is_too_large)


@torch.compiler.assume_constant_result
def gpu_generation() -> int:
    """The major compute capability of the current NVIDIA GPU, 9 for Hopper; 0 without a GPU."""
    has_nvidia_gpu = torch.cuda.is_available() and torch.version.hip is None
    return torch.cuda.get_device_capability()[0] if has_nvidia_gpu else 0


@torch.compiler.assume_constant_result
def has_little_shared_memory() -> bool:
    """Whether a block has 99 KiB on the current GPU, as on RTX 30, 40, 50, A40, L4 and L40S.

    On GPUs for data centres it has 163 KiB or more.
    """
    if not gpu_generation():
        return False
    capability = torch.cuda.get_device_capability()
    return (8, 6) <= capability <= (8, 9) or capability >= (12, 0)


def reads_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel takes keys that heads share.

    Without it PyTorch makes all T × K logits.

    On CUDA only flash attention takes them on all GPUs, without a mask, in 16 bits.
    """
    return not q.is_cuda or (mask is None and q.element_size() == 2)

"""Attention as the models call it: a mechanism, and the kernel that computes it."""

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anlit.errors import UserError
from anlit.nn.attention import cache
from anlit.nn.attention.qk_clip import QKClip
from anlit.nn.kernels import (
    KERNELS,
    KernelName,
    batch_limit,
    check_kernel,
    default_kernel,
    fallback_warning,
    prepare,
)
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.eager import QUERIES_PER_BLOCK
from anlit.nn.kernels.formula import distances, masked_bias
from anlit.nn.kernels.grouped_heads import grouped_product
from anlit.nn.layers.linear import computing_dtype
from anlit.nn.mechanisms.mechanism import Mechanism, mechanism_name

KernelChoice = Literal["auto", KernelName]

_log = logging.getLogger(__name__)


class Attention(nn.Module):
    """softmax(a·g·S + m) v per head, for q and k of unit root mean square.

    Args:
        mechanism: The functions g, a, m of this layer, and its window.
        kernel: The kernel that computes it, or `auto`. See `anlit.nn.kernels`.
        dropout: Share of attention weights dropped in training.
        qk_clip: Record each head's largest score in training, for QK-clip with this threshold; None
            for no QK-clip.

    Raises:
        UserError: The kernel is unknown, or it cannot compute the mechanism on any device.
    """

    def __init__(
        self, mechanism: Mechanism, kernel: str, dropout: float = 0.0, qk_clip: float | None = None
    ) -> None:
        super().__init__()
        check_kernel(kernel, mechanism, dropout=dropout)
        self.mechanism = mechanism
        self.kernel = kernel
        self.dropout = dropout
        self.clip = QKClip(qk_clip, mechanism.n_heads) if qk_clip is not None else None
        self.kernels: dict[tuple[str, torch.dtype, bool, int, bool, tuple[str, ...]], str] = {}
        """By device, dtype, need of a gradient, length, whether documents are packed, and the
        excluded kernels."""
        self.excluded: tuple[str, ...] = ()
        """Kernels that `auto` leaves out, because the current batch exceeds their limits."""
        self.may_compile = True
        """Whether `auto` may take a kernel that must be compiled first. See `allow_compilation`."""

    def allow_compilation(self, may_compile: bool) -> None:
        """Set whether `auto` may take kernels that must be compiled first."""
        if may_compile != self.may_compile:
            self.may_compile = may_compile
            self.kernels.clear()

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Let `auto` take no kernel inside this context that must be compiled first."""
        choices = self.may_compile, self.kernels
        self.may_compile, self.kernels = False, {}
        try:
            yield
        finally:
            self.may_compile, self.kernels = choices

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """q (B, H, T, D); k, v (B, G, T, D) → (B, H, T, D).

        Query head h uses key head h // (H/G).
        """
        if self.clip is not None and self.training:
            self._observe_scores(self.clip, q, k, documents)
        dtype = computing_dtype(q)
        return self.attend(q.to(dtype), k.to(dtype), v.to(dtype), documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Compute `forward` with the kernel alone, in the precision of q, k and v."""
        if isinstance(documents, cache.Continuation):
            k, v = documents.cache.extend(self, k, v, self.mechanism.window)
            if documents.n_earlier:
                return cache.attend(q, k, v, self.mechanism, documents)
        dropout = self.dropout if self.training else 0.0
        kernel: Any = KERNELS[self.kernel_for(q, documents.are_masked)]
        out: Tensor = kernel.attend(q, k, v, self.mechanism, documents, dropout)
        return out

    def kernel_for(self, q: Tensor, is_packed: bool) -> str:
        """Return the name of the kernel for queries like `q`, (B, H, T, D), chosen once per kind.

        Raises:
            UserError: The kernel in the settings cannot compute queries on this device or in this
                precision.
        """
        case = (q.device.type, q.dtype, q.requires_grad, q.shape[-2], is_packed, self.excluded)
        if case not in self.kernels:
            self.kernels[case] = self._choose_kernel(q, is_packed)
        return self.kernels[case]

    def _choose_kernel(self, q: Tensor, is_packed: bool) -> str:
        if self.kernel != "auto":
            check_kernel(self.kernel, self.mechanism, q, self.dropout)
            return self.kernel
        device_type = q.device.type
        name = default_kernel(
            self.mechanism,
            device_type,
            is_packed,
            q,
            self.dropout,
            self.may_compile,
            self.excluded,
        )
        if not self.may_compile:
            return name
        warning = fallback_warning(name, self.mechanism, is_packed, q, self.dropout)
        if warning is not None:
            warn_once(warning)
        return name

    def prepare(self, documents: Documents, h: Tensor) -> None:
        """Choose the kernel for h (B, T, d), and let it store in `documents` what layers share.

        The decoder calls this before the first block, outside of compiled code. `auto` takes
        another kernel if the batch has too many documents or rows for the first.

        Raises:
            UserError: The batch has too many for the kernel in the settings.
        """
        if isinstance(documents, cache.Continuation) and documents.n_earlier:
            return
        # With a frozen embedding h needs no gradient, and later layers' queries do.
        needs_gradient = torch.is_grad_enabled() and (h.requires_grad or self.training)
        q = example_query(self.mechanism, h.shape[1], computing_dtype(h), h.device, needs_gradient)
        with torch.no_grad():
            name = self._kernel_of_batch(q, documents, h.shape[0])
            prepare(KERNELS[name], self.mechanism, documents, h.shape[0])

    def _kernel_of_batch(self, q: Tensor, documents: Documents, n_rows: int) -> str:
        self.excluded = ()
        name = self.kernel_for(q, documents.are_masked)
        while (reason := self._batch_limit(name, q, documents, n_rows)) is not None:
            if self.kernel != "auto":
                raise UserError(
                    f"attention kernel {name!r} cannot compute this batch: {reason}; set "
                    "model.kernel=auto, or a smaller data.batch_size"
                )
            self.excluded += (name,)
            name = self.kernel_for(q, documents.are_masked)
        return name

    def _batch_limit(self, name: str, q: Tensor, documents: Documents, n_rows: int) -> str | None:
        dropout = self.dropout if self.training else 0.0
        return batch_limit(name, self.mechanism, q, documents, n_rows, dropout)

    @torch.no_grad()
    def _observe_scores(self, clip: QKClip, q: Tensor, k: Tensor, documents: Documents) -> None:
        """Pass the scores q·k/√D of all visible keys to `clip`, 512 queries at a time."""
        for first in range(0, q.shape[-2], QUERIES_PER_BLOCK):
            end = min(first + QUERIES_PER_BLOCK, q.shape[-2])
            scores = grouped_product(q[..., first:end, :], k[..., :end, :].mT) * q.shape[-1] ** -0.5
            t = distances(end - first, end, q.device)
            mask = masked_bias(None, t, documents, self.mechanism.window, first, scores.dtype)
            clip.observe(scores + mask)


@functools.cache
def warn_once(sentence: str) -> None:
    """Log a sentence the first time only: all layers of a model log the same."""
    _log.warning(sentence)


def attention_layers(model: nn.Module) -> list[Attention]:
    """The attention of each block, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def kernels_in_use(layers: Iterable[Attention]) -> list[dict[str, Any]]:
    """List the kernels so far, as records: mechanism, tokens, dtype, packing and kernel."""
    records: list[dict[str, Any]] = []
    for layer in layers:
        for (_, dtype, _, length, is_packed, _), kernel in layer.kernels.items():
            record = {
                "mechanism": mechanism_name(layer.mechanism),
                "length": length,
                "dtype": str(dtype).removeprefix("torch."),
                "packed": is_packed,
                "kernel": kernel,
            }
            if record not in records:
                records.append(record)
    return records


def example_query(
    mechanism: Mechanism, length: int, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Tensor:
    """Queries (1, H, T, D) in the memory of one number, as an example for `unsupported_reason`."""
    shape = (1, mechanism.n_heads, length, mechanism.d_head)
    return torch.empty_strided(
        shape, (0, 0, 0, 0), dtype=dtype, device=device, requires_grad=requires_grad
    )

"""Random inputs for attention, as a model has them."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anlit.attention.coefficient import Reference
from anlit.attention.documents import Documents
from anlit.attention.mechanism import Mechanism
from anlit.attention.mechanisms.warm_start import warm_starts

Attend = Callable[[Tensor, Tensor, Tensor, Mechanism, Documents, float], Tensor]


class Inputs:
    """q, k, v and the gradient of the output, from a generator of their own; q and k have unit root mean square.

    They lie in memory as a model's do, (B, T, H, D), and are (B, H, T, D) to who reads them.

    Args:
        mechanism: With coefficients of its own; see `own_copy`.
        documents: Of the batch.
        rows: B.
        heads: H.
        key_heads: G, heads of keys and values.
        width: D.
        dtype: Of all of them.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        documents: Documents,
        rows: int,
        heads: int,
        key_heads: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        device = documents.device
        generator = torch.Generator(device).manual_seed(0)

        def draw(n_heads: int) -> Tensor:
            size = (rows, documents.length, n_heads, width)
            return torch.randn(size, generator=generator, device=device).transpose(1, 2)

        q, k, v, probe = (draw(n) for n in (heads, key_heads, key_heads, heads))
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() for x in (q, k))
        self.q, self.k, self.v = (x.to(dtype).requires_grad_() for x in (q, k, v))
        self.probe = probe.to(dtype)
        self.mechanism, self.documents = mechanism.to(device), documents

    def wider(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another precision, coefficients included."""
        other = copy.copy(self)
        other.q, other.k, other.v = (x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        other.probe, other.mechanism = self.probe.to(dtype), copy.deepcopy(self.mechanism).to(dtype)
        return other

    def forward(self, attend: Attend, dropout: float = 0.0) -> Tensor:
        return attend(self.q, self.k, self.v, self.mechanism, self.documents, dropout)

    def both(self, attend: Attend, dropout: float = 0.0) -> tuple[Tensor, ...]:
        """The output, and the gradients of q, k, v and of what is learned."""
        out = self.forward(attend, dropout)
        leaves = (self.q, self.k, self.v, *self.mechanism.parameters())
        return out.detach(), *torch.autograd.grad(out, leaves, self.probe)


def prepare(backend: ModuleType | None, mechanism: Mechanism, documents: Documents, n_rows: int) -> None:
    """Let a back end derive from the documents what all layers share, if it does."""
    derive = getattr(backend, "prepare", None)
    if derive is not None:
        derive(mechanism, documents, n_rows)


def random_documents(rows: int, length: int, mean: float | None, device: torch.device) -> Documents:
    """Documents of mixed length, some of a few tokens, always the same ones.

    Args:
        rows: B.
        length: T.
        mean: Mean tokens of a document before the row's end cuts it; None for one document a row.
        device: Of the ids; what a loader makes on the host is there.
    """
    if mean is None:
        return Documents(None, length, device)
    generator = torch.Generator().manual_seed(1)
    starts = torch.rand(rows, length, generator=generator) < 1 / mean
    ids = starts.long().cumsum(1)
    on_host = Documents(ids, length, torch.device("cpu"))
    longest = int(on_host.cu_seqlens.diff().max())
    return Documents(ids.to(device), length, device, on_host.cu_seqlens, longest)


def own_copy(mechanism: Mechanism) -> Mechanism:
    """A copy on the CPU with initial values and without hooks; it shares no coefficient and is never sharded."""
    kept: dict[int, Any] = {}
    for module in mechanism.modules():
        kept |= {id(hooks): type(hooks)() for name, hooks in vars(module).items() if name.endswith("_hooks")}
        for parameter in (module.coefficient if isinstance(module, Reference) else module).parameters():
            kept[id(parameter)] = nn.Parameter(torch.zeros(parameter.shape))
    copied = copy.deepcopy(mechanism, kept)
    for module in list(copied.modules()):
        for name, part in module.named_children():
            if isinstance(part, Reference):
                setattr(module, name, part.coefficient)
    for module in copied.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for part in warm_starts(copied):
        part.share.fill_(0.5)  # at 0 every mechanism is plain attention
    return copied.requires_grad_()

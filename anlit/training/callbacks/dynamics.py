"""What happens inside a model while it trains: the hidden states' norms, the blocks' steps, the weights' rotation."""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional

from anlit.nn.layers.sharded import full_tensor
from anlit.training.callbacks.attention_statistics import require_positive
from anlit.training.callbacks.throughput import measuring

MOST_COPIED = 128  # tokens that the copy is made of, or half of a sequence
AT_BOUND = 0.999  # a vector of at least this norm counts as one at its bound of 1


class TrainingDynamics(L.Callback):
    """Logs, every n steps, quantities that explain a loss curve, on the batch of that step and after the step.

    - `hidden/layer_00/norm`: the mean of ‖h‖₂ over tokens after this block, and `…/norm_spread`, its standard deviation
      over its mean. nGPT keeps the norm at 1; anGPT only on average.
    - `hidden/layer_00/step`: the mean of ‖h' − h‖ / ‖h‖, where the block turns h into h'.
    - `rotation/W_q` …: the mean angle in radians by which the optimizer's step turned a row of these matrices,
      restoration of norms included, over all layers: the effective step size (Kosson et al., arXiv 2305.17212).
    - `copying/first`, `copying/second`: the loss in nats per token on random tokens and on the same tokens once more. A
      model that has learnt to copy (Olsson et al., arXiv 2209.11895) has a lower one on the second copy.
    - `norms/share_at_bound`: the share of constrained vectors whose norm is at least 0.999; not for GPT+.

    Training does not change, as in `AttentionStatistics`. It needs one copy of the weights during a measured step.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        sequences: Sequences of the batch that are measured.
    """

    def __init__(self, every_n_steps: int = 50, sequences: int = 4) -> None:
        require_positive(self, every_n_steps=every_n_steps, sequences=sequences)
        self.every_n_steps, self.sequences = every_n_steps, sequences
        self._before: list[tuple[str, Tensor]] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            matrices = pl_module.model.matrices()
            self._before = [
                (name, full_tensor(weight.detach()).clone()) for name, weight in matrices
            ]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before:
            with measuring(trainer, pl_module) as values:
                values |= rotations(
                    self._before, [full_tensor(weight) for _, weight in pl_module.model.matrices()]
                )
                self._before = []
                values |= share_at_bound(pl_module.model) | hidden_states(
                    pl_module, batch, self.sequences
                )
                values |= copying(
                    pl_module, batch.tokens.shape[1], self.sequences, batch.tokens.device
                )


def copying(model: Any, length: int, sequences: int, device: torch.device) -> dict[str, float]:
    """Run `model` on random tokens twice over, the same at every call; returns `copying/first` and `copying/second`.

    The first token of each copy is not counted, because nothing tells it. A length below 4 has no values.
    """
    n = min(length // 2, MOST_COPIED)
    if n < 2:
        return {}
    once = torch.randint(
        model.vocab_size, (sequences, n), generator=torch.Generator().manual_seed(0)
    )
    tokens = once.repeat(1, 2).to(device)
    logits = model(tokens, torch.zeros_like(tokens)).float()
    losses = functional.cross_entropy(
        logits[:, :-1].mT, tokens[:, 1:], reduction="none"
    )  # (B, 2n - 1)
    return {
        "copying/first": float(losses[:, : n - 1].mean()),
        "copying/second": float(losses[:, n:].mean()),
    }


def rotations(before: list[tuple[str, Tensor]], after: list[Tensor]) -> dict[str, float]:
    """The mean angle in radians between each row (out, in) before and after a step: `rotation/<name of the map>`.

    Rows that are 0 before or after are left out, such as those of gates at the start.
    """
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    for (name, old), new in zip(before, after, strict=True):
        kinds[f"rotation/{name}"].append(angles(old, new))
    return {name: float(torch.cat(rows).nanmean()) for name, rows in kinds.items()}


def angles(old: Tensor, new: Tensor) -> Tensor:
    """The angle between each row of two matrices (n, m), (n,) float64, NaN for a row of zeros.

    2·atan2(‖u − v‖, ‖u + v‖) of the unit vectors u and v is exact for small angles, where arccos loses half its digits.
    """
    u, v = (rows.double() / vector_norm(rows.double(), dim=1, keepdim=True) for rows in (old, new))
    return 2 * torch.atan2(vector_norm(u - v, dim=1), vector_norm(u + v, dim=1))


def share_at_bound(decoder: Any) -> dict[str, float]:
    """The share of constrained vectors at their bound, `norms/share_at_bound`; empty for GPT+."""
    norms = [full_tensor(rows) for rows in decoder.row_norms()]
    return (
        {"norms/share_at_bound": float((torch.cat(norms) >= AT_BOUND).double().mean())}
        if norms
        else {}
    )


def hidden_states(model: Any, batch: Any, sequences: int) -> dict[str, float]:
    """Run `model` on the first sequences of `batch`; returns each block's `hidden/layer_00/…`."""
    values: dict[str, float] = {}

    def record(number: int, block: Any, given: tuple[Tensor, ...], result: Tensor) -> None:
        name, before, after = f"hidden/layer_{number:02d}", given[0].float(), result.float()
        norm = vector_norm(after, dim=-1)
        values[f"{name}/norm"] = float(norm.mean())
        values[f"{name}/norm_spread"] = float(norm.std() / norm.mean())
        values[f"{name}/step"] = float(
            (vector_norm(after - before, dim=-1) / vector_norm(before, dim=-1)).mean()
        )

    with ExitStack() as hooks:
        for number, block in enumerate(model.model.blocks):
            hooks.enter_context(block.register_forward_hook(partial(record, number)))
        model(batch.tokens[:sequences], batch.document_ids[:sequences])
    return values

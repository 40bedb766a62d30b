"""Logs norms of hidden states, steps of blocks, rotation of weights, and copying."""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional

from anlit.nn.layers.norms import AT_BOUND
from anlit.nn.layers.sharded import full_tensor, reshard
from anlit.training.callbacks.attention_statistics import require_positive
from anlit.training.callbacks.throughput import measuring

LONGEST_COPY = 128
"""Tokens in the copied text, at most; in a short sequence its half."""


class TrainingDynamics(L.Callback):
    """Logs quantities that explain a loss curve, every n steps, on the step's batch.

    - `hidden/layer_00/norm`: the mean of ‖h‖₂ over tokens after this block. `…/norm_spread` is the
      standard deviation over the mean, and `…/norm_max` the largest. nGPT keeps the norm at 1;
      anGPT only on average.
    - `hidden/layer_00/step`: the mean of ‖h' − h‖ / ‖h‖, where the block turns h into h'.
    - `rotation/W_q` …: the mean angle in radians by which a step turned a row of these matrices.
      The mean is over all layers, after norms are restored. It is the effective step size (Kosson
      et al., arXiv 2305.17212).
    - `copying/first`, `copying/second`: the loss in nats per token on random tokens, and on their
      copy. A model that has learnt to copy has a lower loss on the copy (Olsson et al., arXiv
      2209.11895).
    - `norms/share_at_bound`: the share of constrained vectors with a norm of at least 0.999. GPT+
      has no such value.

    Training does not change, as in `AttentionStatistics`. A measured step needs one copy of the
    weights, with `anlit.FullySharded` of this rank's shards.

    Args:
        every_n_steps: Optimizer steps between two measurements.
        sequences: Sequences of the batch that are measured.
    """

    changes_learning = False

    def __init__(self, every_n_steps: int = 50, sequences: int = 4) -> None:
        require_positive(self, every_n_steps=every_n_steps, sequences=sequences)
        self.every_n_steps = every_n_steps
        self.sequences = sequences
        self._old_matrices: list[tuple[str, Tensor]] = []

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        if (trainer.global_step + 1) % self.every_n_steps == 0:
            self._old_matrices = []
            for name, weight in pl_module.model.matrices():
                self._old_matrices.append((name, weight.detach().clone()))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._old_matrices:
            return
        model = pl_module.model
        with measuring(trainer, pl_module) as values:
            reshard(model)  # another callback may have used the model
            new_matrices = [weight.detach() for _, weight in model.matrices()]
            values |= rotations(self._old_matrices, new_matrices)
            self._old_matrices = []
            values |= share_at_bound(model)
            values |= hidden_states(pl_module, batch, self.sequences)
            length = batch.tokens.shape[1]
            values |= copying(pl_module, length, self.sequences, batch.tokens.device)


def copying(model: Any, length: int, sequences: int, device: torch.device) -> dict[str, float]:
    """Run `model` on random tokens and their copy; return `copying/first` and `copying/second`.

    Every call has the same tokens. The first token of each copy does not count. Nothing predicts
    it. A length below 4 has no values.
    """
    n = min(length // 2, LONGEST_COPY)
    if n < 2:
        return {}
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(model.vocab_size, (sequences, n), generator=generator)
    tokens = text.repeat(1, 2).to(device)  # (B, 2n)
    logits = model(tokens, torch.zeros_like(tokens)).float()
    targets = tokens[:, 1:]
    losses = functional.cross_entropy(logits[:, :-1].mT, targets, reduction="none")  # (B, 2n - 1)
    return {
        "copying/first": float(losses[:, : n - 1].mean()),
        "copying/second": float(losses[:, n:].mean()),
    }


def rotations(old: list[tuple[str, Tensor]], new: list[Tensor]) -> dict[str, float]:
    """The mean angle in radians between old and new rows (out, in): `rotation/<name of the map>`.

    Rows of zeros do not count, such as the rows of gates at the start. Of sharded matrices only the
    angles are gathered; all ranks must call this.
    """
    angles_by_name: dict[str, list[Tensor]] = defaultdict(list)
    for (name, old_matrix), new_matrix in zip(old, new, strict=True):
        angles_by_name[f"rotation/{name}"].append(full_tensor(angles(old_matrix, new_matrix)))
    means = {}
    for name, row_angles in angles_by_name.items():
        means[name] = float(torch.cat(row_angles).nanmean())
    return means


def angles(old: Tensor, new: Tensor) -> Tensor:
    """The angle between each row of two matrices (n, m): (n,) float64, NaN for zeros.

    2·atan2(‖u − v‖, ‖u + v‖) of the unit vectors u and v is exact for small angles. arccos would
    lose half the digits.
    """
    u = _unit_rows(old.double())
    v = _unit_rows(new.double())
    return 2 * torch.atan2(vector_norm(u - v, dim=1), vector_norm(u + v, dim=1))


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / vector_norm(rows, dim=1, keepdim=True)


def share_at_bound(decoder: Any) -> dict[str, float]:
    """The share of constrained vectors at their bound, `norms/share_at_bound`; empty for GPT+."""
    norms = [full_tensor(rows) for rows in decoder.row_norms()]
    if not norms:
        return {}
    is_at_bound = torch.cat(norms) >= AT_BOUND
    return {"norms/share_at_bound": float(is_at_bound.double().mean())}


def hidden_states(model: Any, batch: Any, sequences: int) -> dict[str, float]:
    """Run `model` on the first sequences of `batch`; return each block's `hidden/layer_00/…`."""
    values: dict[str, float] = {}
    with ExitStack() as hooks:
        for number, block in enumerate(model.model.blocks):
            record = partial(_record_block, values, f"hidden/layer_{number:02d}")
            hooks.enter_context(block.register_forward_hook(record))
        model(batch.tokens[:sequences], batch.document_ids[:sequences])
    return values


def _record_block(
    values: dict[str, float], prefix: str, block: Any, inputs: tuple[Tensor, ...], output: Tensor
) -> None:
    """Put norm, spread and step of a block (B, T, d) into `values`; a forward hook."""
    h = inputs[0].float()
    new_h = output.float()
    norm = vector_norm(new_h, dim=-1)
    relative_step = vector_norm(new_h - h, dim=-1) / vector_norm(h, dim=-1)
    values[f"{prefix}/norm"] = float(norm.mean())
    values[f"{prefix}/norm_spread"] = float(norm.std() / norm.mean())
    values[f"{prefix}/norm_max"] = float(norm.max())
    values[f"{prefix}/step"] = float(relative_step.mean())

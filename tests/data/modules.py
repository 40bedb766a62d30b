"""DataModules on prepared shards, as a trainer sets them up, and what they deliver."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch

from anlit.data.batch import Batch
from anlit.data.module import TokenShards
from anlit.targets import IGNORED

LENGTH = 64
Rows = list[tuple[int, ...]]


class CrashError(Exception):
    """What ends an interrupted run."""


class Recorder(L.LightningModule):
    """One weight, and a record of the sequences it was trained on, of this device, and of validation's lengths."""

    context_length = LENGTH
    vocab_size = 320

    def __init__(self, crash_after: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.crash_after = crash_after
        self.seen: list[Rows] = []
        self.validated: set[int] = set()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.crash_after:
            raise CrashError
        self.seen.append([tuple(row) for row in blocks_of([batch])])
        return self.weight.sum() * batch.tokens.float().mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.add(batch.tokens.shape[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0  # Lightning opens the loaders for this
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(**options: Any) -> L.Trainer:
    """A trainer on the CPU that shows nothing and, by default, writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(**{"accelerator": "cpu", **quiet, **options})


def ready(path: str, **changes: Any) -> TokenShards:
    data = TokenShards(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    data.setup()
    return data


def with_trainer(path: str, rank: int = 0, ranks: int = 1, model: Any = None, **changes: Any) -> TokenShards:
    """Shards attached to a trainer of one of several devices."""
    data = TokenShards(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    data.trainer = SimpleNamespace(
        lightning_module=model,
        distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks},
        accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.setup()
    return data


def with_model(path: str, **changes: Any) -> TokenShards:
    model = SimpleNamespace(**{"context_length": LENGTH, "vocab_size": 320, **changes})
    return with_trainer(path, model=model, context_length=None)


def blocks_of(batches: list[Batch]) -> list[list[int]]:
    """Each row's T + 1 tokens."""
    return [row for batch in batches for row in torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()]


def counted(batches: Iterable[Batch]) -> list[int]:
    """The targets that count in the loss."""
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    return targets[targets != IGNORED].tolist()


def all_blocks(tokens: np.ndarray, length: int = LENGTH) -> list[list[int]]:
    n_blocks = (len(tokens) - 1) // length
    return [tokens[block * length : block * length + length + 1].tolist() for block in range(n_blocks)]

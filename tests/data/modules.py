"""DataModules on prepared shards, set up as by a trainer, and the batches that they deliver."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch

from anlit.data.batch import Batch, batch_from_blocks
from anlit.data.module import TokenShards
from anlit.nn.layers.cross_entropy import IGNORE_INDEX

LENGTH = 64
Rows = list[tuple[int, ...]]


class CrashError(Exception): ...


class Recorder(L.LightningModule):
    """A model with a single weight that records the data it gets on this device.

    Attributes:
        seen: the sequences of each training batch.
        validated: the lengths of the validation sequences.
    """

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

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0  # Lightning opens the loaders for this
        return torch.optim.SGD(self.parameters(), lr=0.0)


def quiet_trainer(**options: Any) -> L.Trainer:
    """Return a trainer on the CPU that shows nothing and, by default, writes nothing."""
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{**quiet, **options})


def ready(
    path: Any,
    rank: int = 0,
    ranks: int = 1,
    model: dict[str, int] | None = None,
    kind: Any = TokenShards,
    local_rank: int = 0,
    **changes: Any,
) -> Any:
    """Return a DataModule after setup.

    It has a trainer if there are several devices or a `model` with these settings.
    """
    data = kind(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    if ranks > 1 or model is not None:
        data.trainer = SimpleNamespace(
            lightning_module=SimpleNamespace(**model or {}),
            local_rank=local_rank,
            distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks},
            accumulate_grad_batches=1,
            limit_val_batches=1.0,
            fast_dev_run=False,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )
    data.setup()
    return data


def blocks_of(batches: Iterable[Batch]) -> list[list[int]]:
    """Return each row's T + 1 tokens."""
    blocks: list[list[int]] = []
    for batch in batches:
        last_targets = batch.targets[:, -1:]
        blocks += torch.cat([batch.tokens, last_targets], dim=1).tolist()
    return blocks


def counted(batches: Iterable[Batch]) -> list[int]:
    """Return the targets that count in the loss."""
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    return targets[targets != IGNORE_INDEX].tolist()


def all_blocks(tokens: np.ndarray, length: int = LENGTH) -> list[list[int]]:
    """Return every block of T + 1 tokens in order."""
    n_blocks = (len(tokens) - 1) // length
    starts = range(0, n_blocks * length, length)
    return [tokens[start : start + length + 1].tolist() for start in starts]


def collate(blocks: Sequence, **settings: Any) -> Batch:
    """Collate a list of (T + 1,) arrays into a `Batch`; token 0 ends a document."""
    rows = [np.asarray(block) for block in blocks]
    return batch_from_blocks(np.stack(rows), end_of_document=0, **settings)

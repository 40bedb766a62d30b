"""DataModules on prepared shards, as a trainer sets them up, and what they deliver."""

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
    """One weight, and a record of the sequences it was trained on, of this device, and of validation's lengths."""

    context_length, vocab_size = LENGTH, 320

    def __init__(self, crash_after: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.crash_after, self.seen, self.validated = crash_after, list[Rows](), set[int]()

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
    """A trainer on the CPU that shows nothing and, by default, writes nothing."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return L.Trainer(**{"accelerator": "cpu", **quiet, **options})


def ready(
    path: Any, rank: int = 0, ranks: int = 1, model: dict[str, int] | None = None, kind: Any = TokenShards,
    **changes: Any,
) -> Any:  # fmt: skip
    """A DataModule that is set up, with a trainer if there are several devices or a model of these settings."""
    data = kind(path, **{"context_length": LENGTH, "batch_size": 4, **changes})
    if ranks > 1 or model is not None:
        data.trainer = SimpleNamespace(
            lightning_module=SimpleNamespace(**model or {}),
            distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks}, accumulate_grad_batches=1,
            limit_val_batches=1.0, fast_dev_run=False, strategy=SimpleNamespace(root_device=torch.device("cpu")),
        )  # fmt: skip
    data.setup()
    return data


def blocks_of(batches: list[Batch]) -> list[list[int]]:
    """Each row's T + 1 tokens."""
    return [
        row
        for batch in batches
        for row in torch.cat([batch.tokens, batch.targets[:, -1:]], dim=1).tolist()
    ]


def counted(batches: Iterable[Batch]) -> list[int]:
    """The targets that count in the loss."""
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    return targets[targets != IGNORE_INDEX].tolist()


def all_blocks(tokens: np.ndarray, length: int = LENGTH) -> list[list[int]]:
    n_blocks = (len(tokens) - 1) // length
    return [
        tokens[block * length : block * length + length + 1].tolist() for block in range(n_blocks)
    ]


def collate(blocks: Sequence, **settings: Any) -> Batch:
    """Collate function for loaders of single blocks: a list of (T + 1,) arrays becomes a `Batch`; 0 ends a document."""
    return batch_from_blocks(
        np.stack([np.asarray(block) for block in blocks]), end_of_document=0, **settings
    )

"""The base of anlit's DataModules: the position in the training data, and this device's share."""

from typing import Any, Protocol

import lightning as L

from anlit.data.streams import Share

BATCHES_AHEAD = 2
"""Batches that wait in page-locked memory for a GPU."""


class TrainingLoader(Protocol):
    """Training batches whose position can be saved and restored."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class ResumableData(L.LightningDataModule):
    """A DataModule with the position of its training loader in every checkpoint.

    `train_dataloader` hands each new loader to `_continue_with`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loader: TrainingLoader | None = None
        self._restored_state: dict[str, Any] = {}
        """The checkpoint's position, used until there is a loader; {} for the data's start."""

    @property
    def saves_position(self) -> bool:
        """Whether a continued run has the batches of an uninterrupted run."""
        return True

    def teardown(self, stage: str) -> None:
        """End the training loader's workers; the next run begins at the start of the data."""
        if self._loader is not None:
            self._loader.close()
        self._loader = None
        self._restored_state = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data.

        Lightning saves the loader's state too, but restores it only into a loader that nothing has
        asked for. `Trainer.estimated_stepping_batches` asks for it in `configure_optimizers`.
        """
        return self._loader.state_dict() if self._loader is not None else self._restored_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_state = state_dict
        # Sharded strategies restore after the optimizers have asked for the loader.
        if self._loader is not None:
            self._loader.load_state_dict(state_dict)

    def _continue_with(self, loader: TrainingLoader) -> None:
        """Let a new loader continue at the position of the checkpoint or of the last loader."""
        if position := self.state_dict():
            loader.load_state_dict(position)
        self._loader = loader

    @property
    def _micro_batches(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def _share(self, batch_size: int) -> Share:
        """The part of a global batch that this device reads, `batch_size` sequences."""
        # Not the Trainer's rank: devices that split one model between them get the same data.
        sampler = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        if not sampler:
            return Share(batch_size)
        return Share(batch_size, sampler["rank"], sampler["num_replicas"])

    @property
    def _is_first_device(self) -> bool:
        return self._share(1).rank == 0

    @property
    def _is_on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _n_ahead(self) -> int:
        """Batches made in advance. On a CPU the thread would slow down the computation."""
        return BATCHES_AHEAD if self._is_on_gpu else 0

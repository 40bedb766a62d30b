"""Loaders that make batches of streams and resume, and the base of the DataModules with them."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from anlit.data.batch import Batch
from anlit.data.streams import BlockStream, Share, TokenBlocks
from anlit.errors import WORKER_FIX, RunError, UserError
from anlit.signals import leave_signals_to_parent, signals_held

START_METHOD = "fork"
"""How data workers start, whatever Python's default: forked, in 0.01 s and with all imports."""
# An iterator whose start fails would print a traceback when it is freed: it lacks this attribute.
_MultiProcessingDataLoaderIter._shutdown = True
BATCHES_AHEAD = 2
"""Batches that wait in page-locked memory for a GPU."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Loader:
    """Batches of a finite stream, from its beginning at each iteration.

    Worker processes read the blocks. The process that uses the batches makes them, up to `n_ahead`
    in advance, in a thread. A Loader is not a DataLoader but wraps it: Lightning rebuilds every
    DataLoader and would lose the position in the stream.
    """

    def __init__(
        self,
        stream: BlockStream,
        make_batch: Callable[[TokenBlocks], Batch],
        num_workers: int = 0,
        n_ahead: int = 0,
    ) -> None:
        self.stream = stream
        self.make_batch = make_batch
        self.num_workers = num_workers
        self.n_ahead = n_ahead

    def __len__(self) -> int:
        assert self.stream.n_batches is not None
        return self.stream.n_batches

    def __iter__(self) -> Iterator[Batch]:
        options: dict[str, Any] = {
            # It draws a number, by default from the generator of the model.
            "generator": torch.Generator(),
            # The default makes tensors of the arrays, which cost more to send.
            "collate_fn": _do_not_collate,
        }
        if self.num_workers:
            options["worker_init_fn"] = leave_signals_to_parent
            options["multiprocessing_context"] = START_METHOD
        loader = DataLoader(self.stream, batch_size=None, num_workers=self.num_workers, **options)
        batches = self._make_batches(self._start(loader))
        yield from prefetch(batches, self.n_ahead) if self.n_ahead else batches

    def _make_batches(self, blocks: Iterator[Any]) -> Iterator[Batch]:
        for item in blocks:
            if isinstance(item, UserError):
                raise item
            yield self.make_batch(item)

    def _start(self, loader: DataLoader) -> Iterator[Any]:
        """Start the worker processes. Raise RunError if the machine cannot start them."""
        try:
            with signals_held():
                return iter(loader)
        except OSError as error:
            if not self.num_workers:
                raise
            raise RunError(
                f"the {self.num_workers} processes of data.num_workers cannot be started "
                f"({error.strerror}): {WORKER_FIX}, or set --data.num_workers 0"
            ) from error


def prefetch(items: Iterator[T], n_ahead: int) -> Iterator[T]:
    """Yield items in their order, while a thread makes up to `n_ahead` of them in advance.

    An error while an item is made is raised where that item would be yielded. Closing the iterator
    waits for the thread.
    """
    thread = ThreadPoolExecutor(1, "batches")
    try:
        futures = deque(thread.submit(next, items, None) for _ in range(n_ahead))
        while (item := futures.popleft().result()) is not None:
            futures.append(thread.submit(next, items, None))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


def _do_not_collate(blocks: Any) -> Any:
    return blocks


class ResumableLoader(Loader):
    """Training batches. Their position in the stream can be saved and restored.

    The batches do not depend on `num_workers`. The stream has no end. An epoch has about as many
    batches as the arrays fill once, in whole optimizer steps of `micro_batches`. The next epoch
    continues with the same worker processes, so nothing is left out at the end of an epoch.

    `identity` has the settings that a position in the stream depends on, by name: texts, seed, …
    """

    def __init__(
        self,
        stream: BlockStream,
        make_batch: Callable[[TokenBlocks], Batch],
        num_workers: int,
        identity: dict[str, Any],
        micro_batches: int = 1,
        n_ahead: int = 0,
    ) -> None:
        super().__init__(stream, make_batch, num_workers, n_ahead)
        self.identity = identity
        self.micro_batches = micro_batches
        self.drawn = 0  # sequences that all devices together have drawn
        self._batches: Iterator[Batch] | None = None

    def __len__(self) -> int:
        n_batches = self.stream.n_blocks // self.stream.share.sequences
        return max(1, n_batches // self.micro_batches) * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            if self._batches is None:
                self.stream.start = self.drawn
                self._batches = super().__iter__()
            batch = next(self._batches)
            self.drawn += self.stream.share.sequences
            yield batch

    def close(self) -> None:
        """End the workers. The next iteration starts new workers at the same position."""
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the settings it depends on, and the split over processes."""
        share = self.stream.share
        split = {
            "batch_size": share.batch_size,
            "devices": share.world_size,
            "num_workers": self.num_workers,
        }
        return {"drawn": self.drawn, "identity": self.identity, "split": split}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position from `state_dict`.

        Raises UserError if the position belongs to other data or another order.
        """
        saved_identity = state.get("identity", {})
        for name, value in self.identity.items():
            saved_value = saved_identity.get(name)
            if saved_value != value:
                raise UserError(
                    f"the checkpoint's position in the data is for {name} {saved_value} and this "
                    f"run has {value}: set it back, or start from the weights alone"
                )
        self._log_changed_split(state)
        self.drawn = state["drawn"]
        self.close()

    def _log_changed_split(self, state: dict[str, Any]) -> None:
        """Log if the batches are now split differently. The sequences stay the same."""
        split = self.state_dict()["split"]
        changes = []
        for key, saved_value in state["split"].items():
            if saved_value != split[key]:
                changes.append(f"{key} {saved_value} → {split[key]}")
        if changes and self.stream.share.rank == 0 and self.drawn != state["drawn"]:
            _log.info(
                f"Resuming with {', '.join(changes)}: the data go on after sequence "
                f"{state['drawn']:,}, none is repeated or left out."
            )


class ResumableData(L.LightningDataModule):
    """A DataModule with the position of its training loader in every checkpoint.

    `train_dataloader` hands each new loader to `_continue_with`. A loader has `state_dict`,
    `load_state_dict` and `close`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loader: Any = None
        self._restored_state: dict[str, Any] = {}
        """The checkpoint's position, used until there is a loader; {} for the data's start."""

    @property
    def saves_position(self) -> bool:
        """Whether a continued run has the batches of an uninterrupted run."""
        return True

    def teardown(self, stage: str) -> None:
        """End the training loader's workers. The next run begins at the start of the data."""
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

    def _continue_with(self, loader: Any) -> None:
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
    def _is_first_of_machine(self) -> bool:
        return self.trainer is None or self.trainer.local_rank == 0

    @property
    def _is_on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _n_ahead(self) -> int:
        """Batches made in advance. On a CPU the thread would slow down the computation."""
        return BATCHES_AHEAD if self._is_on_gpu else 0

"""Loaders turn streams of blocks into batches. Every checkpoint has the place in the training stream."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from anlit.data.batch import Batch
from anlit.data.order.streams import Blocks, BlockStream
from anlit.errors import UserError

_log = logging.getLogger(__name__)


class Loader:
    """Batches of a finite stream, from its beginning at each iteration.

    Worker processes read the blocks, and the process that uses the batches makes them. It wraps a DataLoader and is
    not one itself, because Lightning rebuilds every DataLoader and would lose its place.
    """

    def __init__(self, stream: BlockStream, make_batch: Callable[[Blocks], Batch], num_workers: int = 0) -> None:
        self.stream, self.make_batch, self.num_workers = stream, make_batch, num_workers

    def __len__(self) -> int:
        assert self.stream.n_batches is not None
        return self.stream.n_batches

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self.stream,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_as_they_are,
            generator=torch.Generator(),  # it draws a number, by default from the model's generator
        )
        for blocks in loader:
            if isinstance(blocks, UserError):
                raise blocks
            yield self.make_batch(blocks)


def _as_they_are(blocks: Any) -> Any:
    return blocks  # torch's default makes tensors of the arrays, which cost more to send


class ResumableLoader(Loader):
    """Training batches whose place in the stream can be saved and restored.

    The stream has no end. An epoch has about as many batches as the sources fill once. The next epoch continues where
    it ended, with the same worker processes, so nothing is left out at an epoch's end.

    Args:
        num_workers: processes; the batches do not depend on it.
        micro_batches: in an optimizer step; an epoch has whole steps only.
        identity: the settings that a place in the stream depends on, by name: texts, seed, …
    """

    def __init__(
        self,
        stream: BlockStream,
        make_batch: Callable[[Blocks], Batch],
        num_workers: int,
        identity: dict[str, Any],
        micro_batches: int = 1,
    ) -> None:
        super().__init__(stream, make_batch, num_workers)
        self.identity, self.micro_batches = identity, micro_batches
        self.drawn = 0  # sequences that all devices together have drawn
        self._running: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Batches in an epoch: all blocks once, without batches that would fill only a part of an optimizer step."""
        batches = self.stream.n_blocks // self.stream.share.sequences
        return max(1, batches // self.micro_batches) * self.micro_batches

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            if self._running is None:
                self.stream.start = self.drawn
                self._running = super().__iter__()
            batch = next(self._running)
            self.drawn += self.stream.share.sequences
            yield batch

    def close(self) -> None:
        """End the workers; iterating begins new ones at the same place."""
        self._running = None

    def state_dict(self) -> dict[str, Any]:
        share = self.stream.share
        return {
            "drawn": self.drawn,
            "identity": self.identity,
            "split": {"batch_size": share.batch_size, "devices": share.world_size, "num_workers": self.num_workers},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a place that `state_dict` gave; UserError if it is one in other data or in another order."""
        then = state.get("identity", {})
        for name, now in self.identity.items():
            if then.get(name) != now:
                raise UserError(
                    f"The checkpoint's place in the data is for {name} {then.get(name)} and this run has {now}: "
                    "set it back, or start from the weights alone."
                )
        mine = self.state_dict()["split"]
        changed = [f"{name} {old} → {mine[name]}" for name, old in state["split"].items() if old != mine[name]]
        if changed and self.stream.share.rank == 0 and self.drawn != state["drawn"]:
            _log.info(
                f"Resuming with {', '.join(changed)}: the data go on after sequence {state['drawn']:,}, none is "
                "repeated or left out."
            )
        self.drawn = state["drawn"]
        self.close()

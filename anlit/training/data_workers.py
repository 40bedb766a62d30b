"""Worker processes of a user's DataLoaders start and end as those of anlit's own loaders do."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from anlit.data.loaders import START_METHOD
from anlit.signals import leave_signals_to_parent
from anlit.training.lightning_internals import seed_workers


class WorkerStart:
    """The first call in a worker process: it leaves signals to the run, then calls `function`."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, number: int) -> None:
        leave_signals_to_parent()
        if self.function is not None:
            self.function(number)


def prepare_data_workers(trainer: L.Trainer) -> None:
    """Let every DataLoader of a run, of a user's data too, start its workers as anlit's do.

    A signal to a process group would end the workers, and the run before it has saved. Without
    `multiprocessing_context`, Python 3.14 starts workers without the imports of the run and sends
    them all that the dataset refers to, such as the Trainer.
    """
    strategy = trainer.strategy
    strategy.process_dataloader = partial(  # type: ignore[method-assign]
        _process_loader, trainer, strategy.process_dataloader
    )


def _process_loader(trainer: L.Trainer, process: Callable[[object], Any], loader: object) -> Any:
    loader = process(loader)
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    if not isinstance(loader.worker_init_fn, WorkerStart):
        seed_workers(loader, trainer.global_rank)
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
    if loader.multiprocessing_context is None and _has_default_start_method():
        loader.multiprocessing_context = START_METHOD
    return loader


def _has_default_start_method() -> bool:
    """Whether nobody has chosen how processes start; Python lists its default first."""
    chosen_method = multiprocessing.get_start_method(allow_none=True)
    return chosen_method in (None, multiprocessing.get_all_start_methods()[0])

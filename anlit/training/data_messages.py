"""What a run says at its start about data of a user's class."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

from anlit.data.attributes import bytes_per_token_of, name_of
from anlit.data.batch import Batch
from anlit.data.loaders import ResumableData
from anlit.data.module import TokenShards
from anlit.data.token_data import TokenData
from anlit.errors import UserError
from anlit.training.lightning_internals import data_module_of

COSTS = {
    "tokenizer": "anlit generate and score need --tokenizer",
    "fingerprint": "anlit compare cannot tell these data from others",
}
"""An attribute that data may lack → what is missing then."""


def data_messages(trainer: L.Trainer, is_continued: bool) -> Iterator[str]:
    """Yield sentences about the Trainer's DataModule; none about `TokenShards`."""
    data = data_module_of(trainer)
    if data is None or isinstance(data, TokenShards):
        return
    name = name_of(data)
    missing = []
    if bytes_per_token_of(data, "val") is None:
        missing.append("bytes_per_token (no bits per byte)")
    for attribute, cost in COSTS.items():
        if getattr(data, attribute, None) is None:
            missing.append(f"{attribute} ({cost})")
    if missing:
        yield f"{name} does not give {', '.join(missing)}."
    has_validation = trainer.enable_validation
    if isinstance(data, TokenData) and data.val is None:
        has_validation = False
    if not has_validation and trainer.limit_val_batches:
        yield f"{name} has no validation data, so the run has no validation loss to compare."
    obstacle = obstacle_to_exact_resume(trainer)
    if obstacle is not None and is_continued:
        yield (
            f"Continued after step {trainer.global_step} with batches that are not those of an "
            f"uninterrupted run: {obstacle}."
        )
    elif obstacle is not None:
        yield f"A continued run would repeat or leave out batches: {obstacle}."
    is_iterable = any(map(_is_iterable, _leaves(trainer.train_dataloader)))
    if is_iterable and trainer.world_size > 1 and not isinstance(data, ResumableData):
        yield (
            f"{name} trains on an IterableDataset on {trainer.world_size} ranks: it has to give "
            "each rank its own share and as many batches, nothing checks this."
        )


def obstacle_to_exact_resume(trainer: L.Trainer) -> str | None:
    """Return why a continued run would have other batches, and the fix, or None."""
    data = data_module_of(trainer)
    name = name_of(data)
    if trainer.num_training_batches == float("inf"):
        # Lightning then fetches a batch in advance, which the saved position leaves out.
        return f"the training loader of {name} has no length, give it __len__"
    if isinstance(data, ResumableData):
        fix = "give the iterable dataset state_dict and load_state_dict"
        return None if data.saves_position else f"{name} has no position to save, {fix}"
    if is_overridden("state_dict", data, L.LightningDataModule):
        return None
    loaders = _leaves(trainer.train_dataloader)
    if not all(hasattr(loader, "load_state_dict") for loader in loaders):
        return f"{name} saves no position in its data, give it state_dict and load_state_dict"
    if trainer.max_steps <= 0:
        # Lightning opens the loader to count its batches, before it restores the position.
        return "a loader's position is lost with trainer.max_epochs alone, set trainer.max_steps"
    return None


def refuse_other_batch(expected: tuple[int, int] | None, batch: Batch, source: str) -> None:
    """Raise UserError if a budget of tokens expects another number of tokens in a batch.

    `expected` has its sequences and tokens per sequence; None without a budget.
    """
    shape = tuple(batch.tokens.shape)
    if expected is not None and shape != expected:
        raise UserError(
            f"the budget of tokens counts batches of {_times(expected)} tokens, and the first of "
            f"{source} has {_times(shape)}: set trainer.max_steps in place of the budget"
        )


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _leaves(loaders: Any) -> list[Any]:
    """Return the loaders in a loader, list or dictionary of loaders."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)

"""Settings of a run that are out of range, and what Lightning cannot do here, each answered in one sentence."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from anlit.errors import UserError


@dataclass(frozen=True)
class Bound:
    """What a number must be, and the words for it."""

    holds: Callable[[float], bool]
    words: str


AT_LEAST_ONE = Bound(lambda x: x >= 1, "give 1 or more")
NOT_NEGATIVE = Bound(lambda x: x >= 0, "give 0 or more")
POSITIVE = Bound(lambda x: x > 0, "give more than 0")
OR_UNLIMITED = Bound(lambda x: x >= -1, "give 0 or more, or -1 for no limit")
SIZES = ("context_length", "d_ff", "d_model", "n_heads", "n_layers", "vocab_size")
BOUNDS = {
    "checkpoint_every_n_steps": AT_LEAST_ONE,
    "trainer.accumulate_grad_batches": AT_LEAST_ONE,
    "trainer.devices": Bound(lambda x: x >= 1 or x == -1, "give 1 or more, or -1 for all devices"),
    "trainer.gradient_clip_val": NOT_NEGATIVE,
    "trainer.limit_test_batches": NOT_NEGATIVE,
    "trainer.limit_train_batches": NOT_NEGATIVE,
    "trainer.limit_val_batches": NOT_NEGATIVE,
    "trainer.log_every_n_steps": NOT_NEGATIVE,
    "trainer.max_epochs": OR_UNLIMITED,
    "trainer.max_steps": OR_UNLIMITED,
    "trainer.num_nodes": AT_LEAST_ONE,
    "trainer.val_check_interval": POSITIVE,
    **dict.fromkeys(
        (
            f"model.init_args.{name}"
            for name in ("context_length", "d_ff", "d_model", "n_heads", "n_layers", "vocab_size")
        ),
        AT_LEAST_ONE,
    ),
    "model.init_args.optimizer.init_args.lr": NOT_NEGATIVE,
    "model.init_args.optimizer.init_args.weight_decay": NOT_NEGATIVE,
}
"""Dotted key of the configuration → its bound; what a class's constructor checks itself is not here."""


def check_bounds(config: Any) -> None:
    """Raises:
    UserError: A number of the parsed configuration is out of its bound.
    """
    for key, bound in BOUNDS.items():
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and not bound.holds(value):
            raise UserError(f"{key.replace('.init_args', '')}={value} is out of range: {bound.words}")


def make_run_dir(run_dir: str) -> None:
    """Raises:
    UserError: The folder cannot be made, or nothing can be written into it.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        probe = Path(run_dir) / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}): choose a folder that you may write to"
        ) from error


def refused_by_lightning(error: MisconfigurationException) -> UserError:
    """What Lightning cannot do with the Trainer's settings, in one sentence."""
    said = " ".join(str(error).split())
    if "No supported gpu backend found" in said or "CUDAAccelerator" in said:
        return UserError(
            "trainer.accelerator asks for a GPU and none answers here: set --trainer.accelerator cpu --trainer.devices "
            "1, or see what nvidia-smi says"
        )
    return UserError(f"trainer: {said.split('. ')[0].rstrip('.')}")

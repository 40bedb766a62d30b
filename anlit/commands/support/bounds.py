"""Refuses settings of a run that are out of range or that Lightning cannot use, in one sentence each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from anlit.errors import UserError

NO_GPU = (
    "trainer.accelerator needs a GPU, and none was found: set --trainer.accelerator cpu --trainer.devices 1, or check "
    "with nvidia-smi"
)
ADVICE = {
    "No supported gpu backend found": NO_GPU,
    "CUDAAccelerator": NO_GPU,
    "CPUAccelerator": "trainer.devices is no number of processes: give --trainer.devices 1 or more on CPU",
    "Timer(duration=": "trainer.max_time is no duration: give DD:HH:MM:SS, such as 00:12:00:00 for twelve hours",
}
"""Words of a message of Lightning's → the sentence that the user gets instead."""


@dataclass(frozen=True)
class Bound:
    """A condition on a number, and the advice if it does not hold."""

    holds: Callable[[float], bool]
    words: str


AT_LEAST_ONE = Bound(lambda x: x >= 1, "give 1 or more")
NOT_NEGATIVE = Bound(lambda x: x >= 0, "give 0 or more")
POSITIVE = Bound(lambda x: x > 0, "give more than 0")
SEED = Bound(lambda x: 0 <= x < 1 << 32, "give 0 to 4294967295")
OR_UNLIMITED = Bound(lambda x: x >= -1, "give 0 or more, or -1 for no limit")
SIZES = ("context_length", "d_ff", "d_head", "d_model", "n_heads", "n_kv_heads", "n_layers", "vocab_size")
BOUNDS = {
    "checkpoint_every_n_steps": AT_LEAST_ONE,
    "seed_everything": SEED,
    "trainer.accumulate_grad_batches": AT_LEAST_ONE,
    "trainer.devices": Bound(lambda x: x >= 1 or x == -1, "give 1 or more, or -1 for all devices"),
    "trainer.gradient_clip_val": NOT_NEGATIVE,
    "trainer.limit_test_batches": NOT_NEGATIVE,
    "trainer.limit_train_batches": POSITIVE,
    "trainer.limit_val_batches": NOT_NEGATIVE,
    "trainer.log_every_n_steps": NOT_NEGATIVE,
    "trainer.max_epochs": OR_UNLIMITED,
    "trainer.max_steps": OR_UNLIMITED,
    "trainer.num_nodes": AT_LEAST_ONE,
    "trainer.val_check_interval": POSITIVE,
    **dict.fromkeys((f"model.init_args.{name}" for name in SIZES), AT_LEAST_ONE),
    "model.init_args.optimizer.init_args.lr": NOT_NEGATIVE,
    "model.init_args.optimizer.init_args.weight_decay": NOT_NEGATIVE,
    "model.init_args.z_loss": NOT_NEGATIVE,
}
"""Dotted key of the configuration → its bound. Bounds that a constructor checks itself are not here."""


def check_bounds(config: Any) -> None:
    """Check the numbers of a parsed configuration.

    Raises:
        UserError: A number is out of its bound.
    """
    for key, bound in BOUNDS.items():
        value = _number(config.get(key))
        if isinstance(value, int | float) and not isinstance(value, bool) and not bound.holds(value):
            raise UserError(f"{key.replace('.init_args', '')}={value} is out of range: {bound.words}")


def _number(value: Any) -> Any:
    """A number for its digits: `trainer.devices` may be a text such as `0,1`, so the parser leaves `0` a text."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?\d+", value) else value


def make_run_dir(run_dir: str) -> None:
    """Make the run folder.

    Raises:
        UserError: The folder cannot be made or written.
    """
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=run_dir):  # the ranks of a run do this at the same time
            pass
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} cannot be written ({error.strerror}): choose a folder that you may write to"
        ) from error


def refused_by_lightning(error: MisconfigurationException | TypeError) -> UserError:
    """Lightning's error about the Trainer's settings, in one sentence."""
    message = " ".join(str(error).split())
    for words, sentence in ADVICE.items():
        if words in message:
            return UserError(sentence)
    return UserError(f"trainer: {message.split('. ')[0].rstrip('.')}")

"""What Lightning's Trainer tells of the optimizer step under way."""

import lightning as L

from anlit.lightning_internals import completes_step


def is_logged(trainer: L.Trainer, step: int) -> bool:
    """Whether loggers are told of optimizer step number `step`, from 1, which the training batch under way completes.

    Of several micro-batches only the last does; in all others, and in other steps, nothing is to wait for the device.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and step % every == 0 and completes_step(trainer)

"""The mean of the weights over the last share of a run (arXiv 1803.05407)."""

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging

from anlit.errors import UserError
from anlit.training.callbacks.attention_statistics import require_positive
from anlit.training.weight_averages import n_steps_of


class TailAveraging(WeightAveraging):
    """Averages the weights over the last share of the run's optimizer steps, all alike.

    The learning rate follows the schedule. The last step always counts. If the run's length
    changes, so does the first step. A mean that began earlier starts anew.

    Args:
        share: Share of the run's optimizer steps, more than 0 and at most 1.
        every_n_steps: Optimizer steps between two weights of the mean.
        device: The device of the mean; null for the weights' own.
    """

    changes_learning = True

    def __init__(
        self, share: float = 0.2, every_n_steps: int = 1, device: str | None = None
    ) -> None:
        super().__init__(device)
        if not 0 < share <= 1:
            raise UserError(f"TailAveraging has share={share}: give more than 0, at most 1")
        require_positive(self, every_n_steps=every_n_steps)
        self.share = share
        self.every_n_steps = every_n_steps
        self.first_step = 0
        """The first step that may count, from 0."""
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        n_steps = n_steps_of(trainer)
        self._last_step = n_steps - 1
        self.first_step = n_steps - max(1, round(self.share * n_steps))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether the weights after step `step_idx`, from 0, count."""
        if step_idx is None or step_idx < self.first_step:
            return False
        return (self._last_step - step_idx) % self.every_n_steps == 0

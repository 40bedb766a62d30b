"""The learning-rate range test: the loss while the rate grows shows at which rates a model learns."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from anlit.errors import UserError

SMOOTHING = 0.9
LEAST_STEPS = 10
LOST = 0.5
"""The test ends when this share of the loss's decrease is lost again."""


class LearningRateRange(L.Callback):
    """Raises the rate exponentially from `low` to `high` and writes the loss over it (Smith 2017, arXiv 1506.01186).

    For `anlit fit` with trainer/lr_range.yaml, a short run with no other use. It writes lr_range.json and lr_range.png
    into the run folder: the smoothed loss, the rate of the steepest descent and that of the lowest loss. A good peak
    rate lies between them. The test has no cosine and is too short for weight decay to matter, so tune around it.
    Parameter groups with other rates (Muon) keep their ratio to the first. Lightning's LearningRateFinder does not
    work here: it needs a model with one attribute for the rate.

    Args:
        low: Rate of the first step.
        high: Rate of the last step.
        steps: Number of optimizer steps; at most the Trainer's max_steps.
    """

    def __init__(self, low: float = 1e-5, high: float = 1.0, steps: int = 100) -> None:
        if not 0 < low < high or steps < 2 * LEAST_STEPS:
            raise UserError(f"LearningRateRange has low={low}, high={high}, steps={steps}: give 0 < low < high and "
                            f"{2 * LEAST_STEPS} steps or more")  # fmt: skip
        self.low, self.high, self.steps = low, high, steps
        self.rates: list[float] = []
        self.losses: list[float] = []
        self._proportions: list[float] = []
        self._micro: list[float] = []

    def rate(self, step: int) -> float:
        """The rate of optimizer step `step`, from 0."""
        return self.low * (self.high / self.low) ** (step / (self.steps - 1))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.max_steps < self.steps:
            raise UserError(
                f"trainer.max_steps={trainer.max_steps} ends LearningRateRange before its {self.steps} steps: raise it"
            )
        initial = [group.get("initial_lr", group["lr"]) for group in trainer.optimizers[0].param_groups]
        self._proportions = [rate / initial[0] for rate in initial]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for group, proportion in zip(trainer.optimizers[0].param_groups, self._proportions, strict=True):
            group["lr"] = proportion * self.rate(trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._micro.append(float(outputs["loss"].detach()))
        if len(self._micro) < trainer.accumulate_grad_batches:
            return
        loss = float(trainer.strategy.reduce(outputs["loss"].new_tensor(self._micro).mean(), reduce_op="mean"))
        self._micro = []
        broken = not math.isfinite(loss)
        if not broken:
            self.rates.append(self.rate(len(self.losses)))
            self.losses.append(loss)
        if broken or len(self.losses) == self.steps or has_lost(smoothed(self.losses)):
            trainer.should_stop = True
            self.write(Path(trainer.default_root_dir))
            if broken:
                raise UserError(
                    f"the loss became NaN or infinite at a rate of {self.rate(len(self.losses)):.3g}: lr_range.json "
                    "has the losses at the rates below it"
                )

    @rank_zero_only
    def write(self, folder: Path) -> None:
        """Write lr_range.json and lr_range.png."""
        smooth = smoothed(self.losses)
        steepest, lowest = suggestion(self.rates, smooth)
        record = {"steepest": steepest, "lowest": lowest, "rate": self.rates, "loss": self.losses, "smoothed": smooth}
        (folder / "lr_range.json").write_text(json.dumps(record, indent=1) + "\n")
        plot(record, folder / "lr_range.png")
        print(f"learning-rate range: steepest descent at {steepest:.3g}, lowest loss at {lowest:.3g}; see {folder}")


def smoothed(losses: list[float]) -> list[float]:
    """Exponential moving average with bias correction."""
    found, mean = [], 0.0
    for n, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        found.append(mean / (1 - SMOOTHING**n))
    return found


def has_lost(smooth: list[float]) -> bool:
    """Whether half of the decrease is lost again, and at least 2 % of the first loss."""
    if len(smooth) <= LEAST_STEPS:
        return False
    gained = smooth[0] - min(smooth)
    return smooth[-1] - min(smooth) > max(LOST * gained, 0.02 * smooth[0])


def suggestion(rates: list[float], smooth: list[float]) -> tuple[float, float]:
    """The rates of the steepest descent over log rate (before the lowest loss), and of the lowest loss."""
    lowest = int(np.argmin(smooth))
    if lowest < 2:
        return rates[lowest], rates[lowest]
    slopes = np.gradient(np.array(smooth[: lowest + 1]), np.log(rates[: lowest + 1]))
    return rates[int(np.argmin(slopes))], rates[lowest]


def plot(record: dict[str, Any], path: Path) -> None:
    """Loss over rate, with the two rates marked."""
    from anlit.reporting.figure import COLOURS, plt, save, style  # matplotlib: half a second, which only this needs

    with style():
        figure, ax = plt.subplots(figsize=(7, 4.2))
        ax.plot(record["rate"], record["loss"], color=COLOURS[0], alpha=0.3, linewidth=1, label="each step")
        ax.plot(record["rate"], record["smoothed"], color=COLOURS[0], linewidth=1.8, label="smoothed")
        for name, colour in (("steepest", COLOURS[2]), ("lowest", COLOURS[1])):
            ax.axvline(record[name], color=colour, linestyle="--", linewidth=1.2, label=f"{name}: {record[name]:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="training loss (nats per token)")
        ax.set_ylim(0.97 * min(record["loss"]), 1.05 * record["smoothed"][0])
        ax.grid()
        figure.legend(loc="outside lower center", ncols=4)
        save(figure, path)

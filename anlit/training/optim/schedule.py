"""Learning rates over a run. A schedule gives the multiple of the peak rate at a step.

    model: {init_args: {schedule: {class_path: anlit.WSD, init_args: {warmup: 0.01, decay: 0.2}}}}

A user's schedule is a subclass of `Schedule` with the method `at`. `--import MODULE` imports it.
"""

import math
from typing import Literal, get_args

from anlit.config.batch_ramp import Ramp
from anlit.config.objects import Configured
from anlit.config.value_checks import check_ranges
from anlit.errors import UserError

Shape = Literal["linear", "sqrt", "cosine"]
"""The fall of a rate at its share p: 1 − p, 1 − √p or (1 + cos πp)/2.

1 − √p is from arXiv 2405.18392.
"""


class Schedule(Configured):
    """The base of all schedules."""

    def at(self, share: float) -> float:
        """The multiple of the peak rate at a share of the training: 0 first step, 1 last step."""
        raise NotImplementedError

    def factor(self, step: float, n_steps: int) -> float:
        """The multiple of the peak rate at optimizer step `step` (from 0) of `n_steps`.

        `step` is a fraction where the steps of a run have different sizes (`ramped`).
        """
        return self.at(min(1.0, step / max(1, n_steps - 1)))


class WarmedUp(Schedule):
    """A schedule that begins with a linear rise to the peak.

    Args:
        warmup: Share of the optimizer steps in which the rate rises, in [0, 1).
    """

    def __init__(self, warmup: float = 0.0) -> None:
        self.warmup = warmup
        check_ranges("model.schedule", {"__class__": type(self), **vars(self)})

    def factor(self, step: float, n_steps: int) -> float:
        n_warmup = round(self.warmup * n_steps)
        if step < n_warmup:
            return (step + 1) / n_warmup
        return self.after_warmup(step, n_warmup, n_steps)

    def after_warmup(self, step: float, n_warmup: int, n_steps: int) -> float:
        """The multiple of the peak rate from step `n_warmup` on."""
        raise NotImplementedError


class Constant(WarmedUp):
    """Warm-up over a share of the steps, then the peak.

    Args:
        warmup: Share of the optimizer steps with a linear rise to the peak, in [0, 1).
    """

    def after_warmup(self, step: float, n_warmup: int, n_steps: int) -> float:
        return 1.0


class Cosine(WarmedUp):
    """Warm-up over a share of the steps, then a cosine to `final` × the peak at the last step.

    Args:
        warmup: Share of the optimizer steps with a linear rise to the peak, in [0, 1).
        final: Rate at the last step as a share of the peak, 0 or more; [anGPT] uses 0.01.
    """

    shape: Shape = "cosine"

    def __init__(self, warmup: float = 0.0, final: float = 0.01) -> None:
        self.final = final
        super().__init__(warmup)

    def after_warmup(self, step: float, n_warmup: int, n_steps: int) -> float:
        progress = min(1.0, (step - n_warmup) / max(1, n_steps - 1 - n_warmup))
        return self.final + (1 - self.final) * falling(self.shape, progress)


class Linear(Cosine):
    """Warm-up over a share of the steps, then a line to `final` × the peak at the last step.

    Args:
        warmup: Share of the optimizer steps with a linear rise to the peak, in [0, 1).
        final: Rate at the last step as a share of the peak, 0 or more.
    """

    shape: Shape = "linear"


class WSD(WarmedUp):
    """Warm-up, stable, decay (arXiv 2404.06395): the rate falls in the last share of the steps.

    A run may continue with more steps from its stable phase. It keeps the rate once the longer
    run's warm-up is over.

    Args:
        warmup: Share of the optimizer steps with a linear rise to the peak, in [0, 1).
        decay: Share of the optimizer steps at the end in which the rate falls, in [0, 1].
        shape: The shape of the fall.
        final: Rate at the last step as a share of the peak, 0 or more.
    """

    def __init__(
        self, warmup: float = 0.01, decay: float = 0.2, shape: Shape = "linear", final: float = 0.0
    ) -> None:
        self.decay = decay
        self.shape: Shape = shape
        self.final = final
        check_shape(shape)
        super().__init__(warmup)

    def after_warmup(self, step: float, n_warmup: int, n_steps: int) -> float:
        n_decay = min(round(self.decay * n_steps), n_steps - n_warmup)
        n_into_decay = step + 1 - (n_steps - n_decay)
        if n_decay == 0 or n_into_decay <= 0:
            return 1.0
        progress = min(1.0, n_into_decay / n_decay)
        return self.final + (1 - self.final) * falling(self.shape, progress)


class Annealed(Schedule):
    """A schedule until a step, then a fall from its rate.

    `anlit fit --anneal` sets it.

    Args:
        schedule: The schedule of the run that is annealed.
        begin: The number of optimizer steps that the run has taken.
        planned: The number of optimizer steps that the run had planned.
        shape: The shape of the fall.
        final: Rate at the last step as a share of the rate at `begin`, 0 or more.
    """

    def __init__(
        self,
        schedule: Schedule,
        begin: int,
        planned: int,
        shape: Shape = "linear",
        final: float = 0.0,
    ) -> None:
        self.schedule = schedule
        self.begin = begin
        self.planned = planned
        self.shape: Shape = shape
        self.final = final
        check_shape(shape)

    def factor(self, step: float, n_steps: int) -> float:
        if step < self.begin:
            return self.schedule.factor(step, self.planned)
        rate = self.schedule.factor(self.begin - 1, self.planned)
        progress = min(1.0, (step + 1 - self.begin) / max(1, n_steps - self.begin))
        return rate * (self.final + (1 - self.final) * falling(self.shape, progress))


class _Ramped(Schedule):
    """A schedule over steps of different sizes: its shares are shares of the training tokens."""

    def __init__(self, schedule: Schedule, ramp: Ramp) -> None:
        self.schedule = schedule
        self.ramp = ramp

    def factor(self, step: float, n_steps: int) -> float:
        return self.schedule.factor(self.ramp.even_step(int(step), n_steps), n_steps)


def ramped(schedule: Schedule, ramp: Ramp) -> Schedule:
    """The schedule over the steps of `ramp`. Nothing changes if all have one size.

    The fall of an annealed run is over optimizer steps. It begins where the ramp's rate was.
    """
    if len(ramp.schedule) == 1:
        return schedule
    if isinstance(schedule, Annealed):
        inner = ramped(schedule.schedule, ramp)
        return Annealed(inner, schedule.begin, schedule.planned, schedule.shape, schedule.final)
    return _Ramped(schedule, ramp)


def check_shape(shape: str) -> None:
    """Raise UserError if no rate falls in this shape."""
    if shape not in get_args(Shape):
        raise UserError(f"model.schedule.shape={shape} is not known: choose linear, sqrt or cosine")


def falling(shape: Shape, progress: float) -> float:
    """A fall from 1 at progress 0 to 0 at progress 1."""
    if shape == "linear":
        return 1 - progress
    if shape == "sqrt":
        return 1 - math.sqrt(progress)
    return (1 + math.cos(math.pi * progress)) / 2

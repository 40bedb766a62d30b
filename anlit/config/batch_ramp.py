"""The micro-batches of each optimizer step, where the batch grows over a run. Without torch.

The callback `BatchRamp` has the settings. Budgets and estimates read them from a configuration.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from anlit.config.labels import as_list, class_name, init_args
from anlit.errors import UserError

NAME = "BatchRamp"
"""The name of the callback."""


@dataclass(frozen=True)
class Ramp:
    """The micro-batches of each optimizer step.

    Args:
        schedule: Optimizer step → micro-batches per step from that step on, a mapping of integers.

    Raises:
        UserError: The schedule is no such mapping. Or it begins at another step than 0, or has a
            step without a micro-batch.
    """

    schedule: Any

    def __post_init__(self) -> None:
        steps = self.schedule if isinstance(self.schedule, Mapping) else {}
        has_integers = {type(number) for number in chain(*steps.items())} == {int}
        if not has_integers or min(steps) != 0 or min(steps.values()) < 1:
            raise UserError(
                f"{NAME} has schedule={self.schedule}: give the micro-batches, 1 or more, from a "
                "step on, and 0 as the first step: {0: 1, 1000: 2}"
            )

    @property
    def largest(self) -> int:
        """The micro-batches of the largest step."""
        return max(self.schedule.values())

    @property
    def final(self) -> int:
        """The micro-batches of a step at the end of the ramp."""
        return self.schedule[max(self.schedule)]

    def micro_batches(self, step: int) -> int:
        """The micro-batches of optimizer step `step`, from 0."""
        return self.schedule[max(begin for begin in self.schedule if begin <= step)]

    def total(self, n_steps: int) -> int:
        """The micro-batches of the first `n_steps` steps."""
        begins = sorted(self.schedule)
        total = 0
        for begin, end in zip(begins, [*begins[1:], n_steps], strict=True):
            total += max(0, min(end, n_steps) - begin) * self.schedule[begin]
        return total

    def steps_within(self, n_micro_batches: int) -> int:
        """The number of whole steps that these micro-batches allow."""
        return bisect_right(range(1, n_micro_batches + 1), n_micro_batches, key=self.total)

    def even_step(self, step: int, n_steps: int) -> float:
        """The step of equal steps, `n_steps` in all, that has taken the same share of the tokens.

        0 at the first step and n_steps − 1 at the last.
        """
        n_before_last = self.total(n_steps - 1)
        if n_before_last == 0:
            return float(step)
        return (n_steps - 1) * self.total(step) / n_before_last


def check_ramp(ramp: Ramp, accumulate_grad_batches: int) -> None:
    """Raise UserError if a ramp does not end with its largest step, `accumulate_grad_batches`."""
    if ramp.final == ramp.largest == accumulate_grad_batches:
        return
    largest = ramp.largest
    raise UserError(
        f"{NAME} has steps of up to {largest} micro-batches and ends with {ramp.final}, and "
        f"trainer.accumulate_grad_batches={accumulate_grad_batches}: end with the largest step, "
        f"and set --trainer.accumulate_grad_batches {largest}"
    )


def configured_ramp(trainer: Mapping[str, Any]) -> Ramp:
    """The ramp that a configuration's settings of the Trainer describe; else equal steps.

    Raises UserError for a wrong ramp, or a ramp beside `max_epochs`.
    """
    accumulate = int(trainer.get("accumulate_grad_batches") or 1)
    for callback in as_list(trainer.get("callbacks")):
        if class_name(callback) == NAME:
            ramp = Ramp(_with_integer_steps(init_args(callback).get("schedule")))
            check_ramp(ramp, accumulate)
            _refuse_epochs(trainer.get("max_epochs"))
            return ramp
    return Ramp({0: accumulate})


def _with_integer_steps(schedule: Any) -> Any:
    """A schedule with integers for steps. In a run's config.yaml they are texts."""
    if not isinstance(schedule, Mapping):
        return schedule
    return {int(step) if str(step).isdecimal() else step: n for step, n in schedule.items()}


def _refuse_epochs(max_epochs: int | None) -> None:
    if max_epochs is not None and max_epochs > 0:
        raise UserError(
            f"trainer.max_epochs={max_epochs} counts passes through the data, which {NAME} makes "
            "shorter: set trainer.max_steps or max_tokens"
        )


def ramp_of(trainer: Any) -> Ramp:
    """The ramp of a Trainer's callbacks; equal steps without one."""
    for callback in trainer.callbacks:
        ramp = getattr(callback, "ramp", None)
        if isinstance(ramp, Ramp):
            return ramp
    return Ramp({0: trainer.accumulate_grad_batches})

"""The sizes of steps, and of runs, under a ramp of the batch."""

from typing import Any

import pytest

from anlit.config.batch_ramp import Ramp, configured_ramp
from anlit.errors import UserError

RAMPS = {
    "equal": Ramp({0: 3}),
    "growing": Ramp({0: 1, 2: 2, 5: 4}),
    "in another order": Ramp({5: 4, 0: 1, 2: 2}),
    "late": Ramp({0: 2, 1: 3, 100: 7}),
    "falling": Ramp({0: 4, 3: 1}),
}
each_ramp = pytest.mark.parametrize("ramp", RAMPS.values(), ids=RAMPS.keys())


GUARD = {"class_path": "anlit.training.callbacks.LossGuard"}


def sizes(ramp: Ramp, n_steps: int) -> list[int]:
    """The micro-batches of each step, by going through the schedule in the order of its steps."""
    result = []
    current = 0
    for step in range(n_steps):
        current = ramp.schedule.get(step, current)
        result.append(current)
    return result


@each_ramp
@pytest.mark.parametrize("n_steps", [0, 1, 2, 5, 6, 99, 120])
def test_totals_are_sums_of_steps(ramp: Ramp, n_steps: int) -> None:
    expected = sizes(ramp, n_steps)

    of_steps = list(map(ramp.micro_batches, range(n_steps)))

    assert of_steps == expected
    assert ramp.total(n_steps) == sum(expected)


@each_ramp
@pytest.mark.parametrize("n_micro_batches", [0, 1, 2, 7, 8, 9, 400])
def test_a_budget_is_the_whole_steps_that_it_allows(ramp: Ramp, n_micro_batches: int) -> None:
    n_steps = ramp.steps_within(n_micro_batches)

    total = sum(sizes(ramp, n_steps))
    total_of_one_more = sum(sizes(ramp, n_steps + 1))
    assert total <= n_micro_batches < total_of_one_more


def test_equal_steps_are_their_own_measure() -> None:
    ramp = Ramp({0: 3})

    for step in range(100):
        assert ramp.even_step(step, 100) == step
    assert ramp.even_step(0, 1) == 0


def test_the_measure_is_the_share_of_the_tokens() -> None:
    ramp = Ramp({0: 1, 2: 2, 5: 4})

    shares = [ramp.even_step(step, 7) / 6 for step in range(7)]

    n_before_step = [0, 1, 2, 4, 6, 8, 12]
    expected = [n_before / 12 for n_before in n_before_step]
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [{0: 2, 9: 4}, {"0": 2, "9": 4}])
def test_a_configuration_has_the_ramp_of_its_callback(schedule: dict) -> None:
    """Steps are texts in a config.yaml that a run has written."""
    ramp = {
        "class_path": "anlit.training.callbacks.BatchRamp",
        "init_args": {"schedule": schedule},
    }

    for callbacks in (ramp, [GUARD, ramp]):
        trainer = {"accumulate_grad_batches": 4, "callbacks": callbacks}
        configured = configured_ramp(trainer)
        assert configured.schedule == {0: 2, 9: 4}


def test_a_configuration_without_a_ramp_has_equal_steps() -> None:
    trainer = {"accumulate_grad_batches": 4, "callbacks": [GUARD]}

    configured = configured_ramp(trainer)

    assert configured.schedule == {0: 4}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="without steps"),
        pytest.param({1: 2}, id="without step 0"),
        pytest.param({-1: 1, 0: 2}, id="a step before 0"),
        pytest.param({0: 0}, id="no micro-batch"),
        pytest.param({0: 1.5}, id="a part of a micro-batch"),
        pytest.param({0: True}, id="a yes in place of a number"),
    ],
)
def test_a_wrong_schedule_is_refused(schedule: Any) -> None:
    callback = {
        "class_path": "anlit.training.callbacks.BatchRamp",
        "init_args": {"schedule": schedule},
    }

    with pytest.raises(UserError, match="and 0 as the first step"):
        Ramp(schedule)
    with pytest.raises(UserError, match="and 0 as the first step"):
        configured_ramp({"callbacks": [callback]})

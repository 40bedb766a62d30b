"""The shapes of the learning rate: values worked out by hand, bounds, options."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from anlit import GPT
from anlit.config.batch_ramp import Ramp
from anlit.errors import UserError
from anlit.training.optim.schedule import WSD, Annealed, Constant, Cosine, Linear, Schedule, ramped
from tests.nn.models.tiny import fit, tiny


def factors(schedule: Schedule, n_steps: int) -> list[float]:
    return [schedule.factor(step, n_steps) for step in range(n_steps)]


@pytest.mark.parametrize("kind", [Cosine, Linear, Constant, WSD])
def test_warm_up_rises_linearly_to_the_peak(kind: Any) -> None:
    values = factors(kind(warmup=0.4), 10)

    warm_up = values[:4]
    later = values[4:]
    assert warm_up == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert later[0] == pytest.approx(1.0)
    assert later == sorted(later, reverse=True)


@pytest.mark.parametrize("warmup", [0.0, 0.2, 0.9])
def test_a_run_of_one_step_has_the_peak(warmup: float) -> None:
    schedule = Cosine(warmup, final=0.0)

    assert schedule.factor(0, 1) == 1.0


def test_warm_up_may_take_all_steps_but_the_last() -> None:
    values = factors(Cosine(warmup=0.9, final=0.5), 3)

    assert values == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_cosine_halves_in_the_middle_and_ends_at_final() -> None:
    schedule = Cosine(warmup=0.0, final=0.1)
    fall_of_a_fifth = (1 + math.cos(math.pi / 5)) / 2

    assert schedule.factor(0, 11) == 1.0
    assert schedule.factor(2, 11) == pytest.approx(0.1 + 0.9 * fall_of_a_fifth)
    assert schedule.factor(5, 11) == pytest.approx(0.55)
    assert schedule.factor(10, 11) == pytest.approx(0.1)
    assert schedule.factor(50, 11) == pytest.approx(0.1)


def test_a_line_falls_by_equal_amounts() -> None:
    values = factors(Linear(final=0.2), 5)

    assert values == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_constant_rate_is_the_peak() -> None:
    values = factors(Constant(), 4)

    assert values == [1.0] * 4


MIDDLE = {
    "linear": 0.5,
    "sqrt": 1 - math.sqrt(0.5),
    "cosine": 0.5,
}
"""The shape of a fall → its value in the middle."""


@pytest.mark.parametrize("shape", MIDDLE)
def test_wsd_is_stable_and_falls_in_its_last_share(shape: Any) -> None:
    values = factors(WSD(warmup=0.1, decay=0.4, shape=shape), 10)

    assert values[:6] == [1.0] * 6
    assert values[7] == pytest.approx(MIDDLE[shape])
    assert values[9] == pytest.approx(0.0)


def test_wsd_without_a_decay_is_constant() -> None:
    schedule = WSD(warmup=0.0, decay=0.0)

    # torch asks for the step after the last step too.
    for step in range(7):
        assert schedule.factor(step, 5) == 1.0


def test_wsd_does_not_jump_where_a_stable_run_is_given_more_steps() -> None:
    schedule = WSD(warmup=0.1, decay=0.2)

    assert schedule.factor(59, 100) == 1.0
    assert schedule.factor(60, 300) == 1.0


@pytest.mark.parametrize(
    "schedule",
    [Cosine(0.1, 0.01), Linear(), Constant(), WSD()],
    ids=lambda schedule: type(schedule).__name__,
)
def test_annealing_begins_at_the_rate_of_the_run_and_ends_at_zero(schedule: Schedule) -> None:
    annealed = Annealed(schedule, begin=50, planned=100)

    values = factors(annealed, 60)

    factor_before = schedule.factor(49, 100)
    fall = [factor_before * (1 - step / 10) for step in range(1, 11)]
    assert values[:50] == factors(schedule, 100)[:50]
    assert values[50:] == pytest.approx(fall)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            Cosine,
            {"warmup": 1.0},
            "model.schedule.warmup=1.0 is out of range: give 0 or more and less than 1",
        ),
        (
            Linear,
            {"final": -0.1},
            "model.schedule.final=-0.1 is out of range: give 0 or more",
        ),
        (
            WSD,
            {"decay": 1.5},
            "model.schedule.decay=1.5 is out of range: give 0 to 1",
        ),
        (
            WSD,
            {"shape": "step"},
            "model.schedule.shape=step is not known: choose linear, sqrt or cosine",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        kind(**settings)

    assert str(error.value) == message


class Triangle(Schedule):
    """A user's schedule with one method."""

    def at(self, share: float) -> float:
        return 1 - abs(2 * share - 1)


def test_a_schedule_of_ones_own_gives_the_factor_at_a_share_of_the_training() -> None:
    values = factors(Triangle(), 5)

    assert values == [0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("options", "class_path", "settings"),
    [
        (
            ["--model.schedule=Linear", "--model.schedule.final=0"],
            "anlit.Linear",
            {"final": 0.0},
        ),
        (
            ["--model.schedule=WSD", "--model.schedule.decay=0.1"],
            "anlit.WSD",
            {"decay": 0.1},
        ),
        (
            ["--model.schedule.warmup=0.1"],
            "anlit.Cosine",
            {"warmup": 0.1},
        ),
    ],
)
def test_options_choose_a_schedule(
    printed_config: Any, options: list[str], class_path: str, settings: dict[str, float]
) -> None:
    config = printed_config("--model=GPT", "--data=PythonSources", *options)

    schedule = config["model"]["init_args"]["schedule"]
    assert schedule["class_path"] == class_path
    assert schedule["init_args"].items() >= settings.items()


def test_settings_alone_are_of_the_schedule_that_the_model_has(
    printed_config: Any, tmp_path: Path
) -> None:
    file = tmp_path / "rate.yaml"
    file.write_text("model: {init_args: {schedule: {warmup: 0.3}}}")

    config = printed_config("--model=GPT", "--data=PythonSources", f"--config={file}")

    schedule = config["model"]["init_args"]["schedule"]
    assert schedule["class_path"] == "anlit.Cosine"
    assert schedule["init_args"] == {"warmup": 0.3, "final": 0.01}


GROWING = {0: 1, 4: 2, 6: 4}
"""10 steps take 1 1 1 1 2 2 4 4 4 4 micro-batches, and 20 before the last."""


def test_shares_of_a_ramp_are_shares_of_the_tokens() -> None:
    taken_before = [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]

    values = factors(ramped(Linear(final=0.0), Ramp(GROWING)), 10)

    expected = [1 - n / 20 for n in taken_before]
    assert values == pytest.approx(expected)


def test_without_a_ramp_the_schedule_stays() -> None:
    schedule = Cosine(warmup=0.1)

    assert ramped(schedule, Ramp({0: 4})) is schedule


def test_an_annealed_run_falls_from_the_rate_of_its_ramp() -> None:
    ramp = Ramp(GROWING)
    line = Linear(final=0.0)
    run = ramped(line, ramp)
    annealed = ramped(Annealed(line, begin=7, planned=10), ramp)

    values = factors(annealed, 9)

    rate = run.factor(6, 10)
    assert values[:7] == factors(run, 10)[:7]
    assert values[7:] == pytest.approx([rate / 2, 0.0])


def test_the_saved_schedule_loads_into_torchs_own_of_a_function() -> None:
    """Its state has {} where torch writes None for a function."""
    model = tiny(GPT)
    fit(model, 3)
    state = model.trainer.lr_scheduler_configs[0].scheduler.state_dict()
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in state["base_lrs"]]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)

    scheduler.load_state_dict(state)
    optimizer.step()
    scheduler.step()

    assert state["lr_lambdas"] == [{}] * len(groups)
    assert scheduler.get_last_lr() == pytest.approx([rate * 0.5**4 for rate in state["base_lrs"]])

"""The sections that a study may ask for in its report, with their options."""

from collections.abc import Callable
from typing import Any, NamedTuple

from anlit.errors import UserError
from anlit.study.grid import check_schema
from anlit.study.plan import Arm, Study
from anlit.study.results import RUN_VALUES, StudyResults, is_number
from anlit.study.sections.annealed import annealed
from anlit.study.sections.convergence import convergence
from anlit.study.sections.dynamics import dynamics
from anlit.study.sections.embed import embed
from anlit.study.sections.loss_gap import loss_gap
from anlit.study.sections.onset import onset
from anlit.study.sections.scaling import scaling
from anlit.study.sections.trend import trend
from anlit.study.sections.tuning import tuning

NUMBER = (int, float)


class Section(NamedTuple):
    """A section of a study's report."""

    write: Callable[[StudyResults, dict[str, Any]], list[str]]
    """Makes the Markdown, and draws the pictures, of results and options."""
    required: dict[str, Any]
    """Types of the options that it needs."""
    optional: dict[str, Any]
    """Types of further options."""


SECTIONS = {
    "convergence": Section(convergence, {}, {}),
    "tuning": Section(tuning, {}, {}),
    "trend": Section(trend, {"over": str}, {"value": str, "arms": [str]}),
    "loss_gap": Section(loss_gap, {"baseline": str, "each": str}, {"over": str}),
    "scaling": Section(scaling, {}, {"resamples": int}),
    "onset": Section(onset, {"loss": NUMBER, "after": NUMBER, "baseline": str}, {}),
    "dynamics": Section(dynamics, {}, {"arms": [str]}),
    "annealed": Section(annealed, {}, {}),
    "embed": Section(embed, {"name": str}, {}),
}


def check_sections(study: Study) -> None:
    """Raise UserError if a section, an option or an arm that it names is unknown or missing."""
    for name, options in study.sections:
        if name not in SECTIONS:
            raise UserError(
                f"{study.path} asks for the section '{name}': choose one of {', '.join(SECTIONS)}"
            )
        section = SECTIONS[name]
        location = f"the section '{name}' of {study.path}"
        check_schema(location, options, section.required | section.optional)
        for option in section.required:
            if option not in options:
                raise UserError(f"{location} lacks the option '{option}': give it")
        _check_arm_names(study, options, location)
        if name == "loss_gap":
            _check_baseline(options, [arm.base for arm in study.arms], location)
        if name == "onset":
            _check_baseline(options, [arm.name for arm in study.arms], location)
        if name == "embed":
            _check_embed(study, options, location)
        if name in ("trend", "loss_gap"):
            _check_numbers(study, options, location)
        if name == "loss_gap":
            _check_panels(study, options["each"], location)
        if name == "annealed":
            _check_annealed(study, location)


def _check_arm_names(study: Study, options: dict[str, Any], location: str) -> None:
    names: dict[str, None] = {}
    for arm in study.arms:
        names |= {arm.base: None, arm.name: None}
    for name in options.get("arms") or ():
        if name not in names:
            raise UserError(
                f"{location} names the arm '{name}', which is none of {', '.join(names)}"
            )


def _check_baseline(options: dict[str, Any], names: list[str], location: str) -> None:
    """Raise UserError if the baseline is not an arm: of `loss_gap`, one with all its points."""
    if options["baseline"] not in names:
        raise UserError(
            f"{location} has the baseline '{options['baseline']}', which is none of "
            f"{', '.join(dict.fromkeys(names))}"
        )


def _check_embed(study: Study, options: dict[str, Any], location: str) -> None:
    commands = study.content.get("after") or {}
    if options["name"] not in commands:
        advice = f"choose one of {', '.join(commands)}" if commands else "give one there"
        raise UserError(
            f"{location} has the name '{options['name']}', which is not a command of `after`: "
            f"{advice}"
        )


def _check_annealed(study: Study, location: str) -> None:
    if study.annealing is None:
        raise UserError(f"{location} has no annealed runs: give `anneal: {{max_steps: [lengths]}}`")
    if not study.comparisons:
        raise UserError(f"{location} has nothing to compare with: give `baseline: ARM`")


def _check_numbers(study: Study, options: dict[str, Any], location: str) -> None:
    """Raise UserError if `over` or `value` is not a number in every point of the arms."""
    for arm in study.arms:
        if not arm.is_named_in(options.get("arms")):
            continue
        numbers = [*RUN_VALUES, *_numeric_settings(arm)]
        over = options.get("over", RUN_VALUES[0])
        value = options.get("value", "loss")
        for key, name, allowed in (("over", over, numbers), ("value", value, ["loss", *numbers])):
            if name not in allowed:
                raise UserError(
                    f"{location} has {key} '{name}', which is not a number of arm '{arm.name}': "
                    f"vary or tune it, or choose one of {', '.join(numbers)}"
                )


def _check_panels(study: Study, each: str, location: str) -> None:
    """Raise UserError if an arm does not vary what has a panel for each of its values."""
    for arm in study.arms:
        if each not in arm.varied.shown:
            choices = ", ".join(arm.varied.shown) or "none"
            raise UserError(
                f"{location} asks for each '{each}', which arm '{arm.name}' does not vary: choose "
                f"one of {choices}"
            )


def _numeric_settings(arm: Arm) -> list[str]:
    """The settings that every point of an arm has as a number."""
    points = [arm.varied.shown | point.shown for point in arm.points]
    names = []
    for name in points[0]:
        if all(is_number(point.get(name)) for point in points):
            names.append(name)
    return names

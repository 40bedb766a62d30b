"""Read a study's YAML, see docs/studies.md."""

import math
from typing import Any

from anlit.config.files import configuration_file
from anlit.errors import UserError
from anlit.study.anneal import CALLBACKS, DEFAULT_DECAY, LENGTHS, Annealing
from anlit.study.fairness import check_distinct_seeds, check_fairness
from anlit.study.grid import DATA_SEED, GRID_SCHEMA, GridPoint, check_schema, expand_grid, safe_name
from anlit.study.plan import Arm, PlannedComparison, Study, read_config
from anlit.study.search import (
    EXAMPLE,
    SEARCH_SCHEMA,
    Search,
    SearchRange,
    draw_points,
    has_range,
    read_search,
)

RUN_SECTIONS = {"model", "data", "trainer"}
"""The parts of a run's configuration. A study has none of these keys."""
PACE_SCHEMA = {"flops_per_second": (int, float), "measured": str}
ARM_SCHEMA = {
    "title": str,
    "configs": [str],
    "settings": GRID_SCHEMA,
    "tune": (dict, list),
    "vary": (dict, list),
}
ANNEAL_SCHEMA = {"max_steps": [int], "decay": (int, float)}
COMPARISON_SCHEMA = {"title": str, "baseline": str, "arms": [str]}
STUDY_SCHEMA = {
    "title": str,
    "question": str,
    "shared": ARM_SCHEMA,
    "arms": {str: ARM_SCHEMA},
    "seeds": [(int, dict)],
    "tuning_seeds": [(int, dict)],
    "equal_tuning": bool,
    "anneal": ANNEAL_SCHEMA,
    "search": SEARCH_SCHEMA,
    "budgets": {str: dict},
    "baseline": str,
    "comparisons": [COMPARISON_SCHEMA],
    "sections": [(str, dict)],
    "pace": PACE_SCHEMA,
    "after": {str: str},
}
"""The keys of a study's file, see `anlit.io.read.check_content`.

Grids are checked in `grid.py`, options of sections in `sections/registry.py`.
"""


def read_study(path: str, budget: str | None) -> Study:
    """Read the study in the file `path`, local or shipped, with a budget.

    `budget` is None if the file lists no budgets.

    Raises:
        UserError: A file or the budget does not exist, a key is unknown, or the study is unfair.
    """
    content = read_config(path)
    _refuse_run(content, path)
    check_schema(path, content, STUDY_SCHEMA)
    content = merge(content, _read_budget(content, path, budget))
    check_schema(path, content, STUDY_SCHEMA)
    _check_pace(content, path)
    if not content.get("arms"):
        raise UserError(f"{path} lists no arms: give `arms: {{name: {{configs: [files]}}}}`")
    annealing = _read_annealing(content, path)
    search = read_search(content, path)
    arms: list[Arm] = []
    for name, entry in content["arms"].items():
        arms += _read_arms(name, entry, content, path, annealing, search)
    if search is not None and not any(arm.ranges for arm in arms):
        raise UserError(
            f"search of {path} has no range to draw from: give one such as "
            "`tune: {dotted.key: {low: 0.001, high: 0.1, scale: log}}`, or leave `search` out"
        )
    study = Study(
        path=path,
        budget=budget,
        content=content,
        arms=tuple(arms),
        seeds=_read_seeds(content, "seeds", [1], path),
        tuning_seeds=_read_seeds(content, "tuning_seeds", [0], path),
        comparisons=_read_comparisons(content, arms, path),
        annealing=annealing,
        search=search,
    )
    check_fairness(study)
    return study


def _refuse_run(content: Any, path: str) -> None:
    """Raise UserError for a configuration of `anlit fit`."""
    if isinstance(content, dict) and not RUN_SECTIONS.isdisjoint(content):
        raise UserError(
            f"{path} configures a run and is not a plan of a study: give it to anlit fit --config "
            f"{path}, or name it in the configs of an arm"
        )


def _read_budget(content: dict[str, Any], path: str, budget: str | None) -> dict[str, Any]:
    """The changes of a budget. UserError if the file does not list it."""
    budgets = content.get("budgets") or {None: {}}
    if budget in budgets:
        return budgets[budget] or {}
    names = ", ".join(map(str, filter(None, budgets)))
    if names:
        raise UserError(f"{path} has the budgets {names}: choose one with --budget")
    raise UserError(f"{path} has no budgets: leave --budget out")


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge `changes` into a copy of `base`.

    Mappings are merged, other values are replaced, null removes a key.
    """
    merged = dict(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _check_pace(content: dict[str, Any], path: str) -> None:
    rate = content.get("pace", {}).get("flops_per_second")
    if rate is not None and not 0 < rate < math.inf:
        raise UserError(
            f"pace.flops_per_second of {path} is {rate}: give a number above 0, or leave it out"
        )


def _read_annealing(content: dict[str, Any], path: str) -> Annealing | None:
    """The `anneal` of the YAML. None without it. Raises UserError if a length has no decay."""
    entry = content.get("anneal")
    if entry is None:
        return None
    lengths = entry.get("max_steps", [])
    decay = entry.get("decay", DEFAULT_DECAY)
    if not 0 < decay < 1:
        raise UserError(f"anneal.decay of {path} is {decay}: give more than 0 and less than 1")
    annealing = Annealing(tuple(sorted(lengths)), decay)
    has_branches = all(0 < annealing.n_stable(n) < n for n in lengths)
    is_distinct = len(set(annealing.branches)) == len(lengths)
    if not (lengths and has_branches and is_distinct):
        raise UserError(
            f"anneal.max_steps of {path} is {lengths}: give different numbers of steps, of which "
            f"{decay:g} is a step or more"
        )
    return annealing


def _read_arms(
    name: str,
    entry: Any,
    content: dict[str, Any],
    path: str,
    annealing: Annealing | None,
    search: Search | None,
) -> list[Arm]:
    """The arms of an entry of the YAML, one for each point of its `vary`."""
    shared = content.get("shared", {})
    configs = (*entry.get("configs", ()), *shared.get("configs", ()))
    for config in configs:
        configuration_file(config, f"configs of arm '{name}' in {path}:")
    settings = shared.get("settings", {}) | entry.get("settings", {})
    tune = entry.get("tune", shared.get("tune"))
    points, ranges = _read_tuning(tune, search, f"tune of arm '{name}' in {path}")
    varied_grid = entry.get("vary", shared.get("vary"))
    arms = []
    for varied in expand_grid(varied_grid, f"vary of arm '{name}' in {path}"):
        title = str(entry.get("title") or name)
        for key, value in varied.shown.items():
            title += f", {key} {safe_name(value)}"
        arm = Arm(
            name=f"{name}_{varied.name}" if varied.name else str(name),
            base=str(name),
            title=title,
            configs=configs,
            varied=varied,
            settings=_arm_settings(settings | varied.settings, points[0], annealing, name, path),
            points=points,
            ranges=ranges,
        )
        arms.append(arm)
    return arms


def _read_tuning(
    tune: Any, search: Search | None, location: str
) -> tuple[tuple[GridPoint, ...], tuple[SearchRange, ...]]:
    """The points of a `tune`, and the ranges that they are drawn from."""
    if not has_range(tune):
        return tuple(expand_grid(tune, location)), ()
    if search is None:
        raise UserError(
            f"{location} has a range, and the study has no `search`: give `{EXAMPLE}`, or values "
            "such as `[1, 2]`"
        )
    points, ranges = draw_points(tune, search, location)
    return tuple(points), tuple(ranges)


def _arm_settings(
    settings: dict[str, Any],
    point: GridPoint,
    annealing: Annealing | None,
    name: str,
    path: str,
) -> dict[str, Any]:
    """The settings of an arm's measured runs. `point` is one that it tunes.

    Raises UserError for settings that `anneal` has to give.
    """
    if annealing is None:
        return settings
    if CALLBACKS in point.settings:
        raise UserError(
            f"tune of arm '{name}' in {path} has {CALLBACKS}, to which `anneal` adds the "
            "checkpoints that annealed runs begin from: make it a `vary`"
        )
    for key in LENGTHS:
        if key in settings or key in point.settings:
            raise UserError(
                f"arm '{name}' of {path} sets {key}, and anneal.max_steps gives the lengths of "
                "the runs: leave it out"
            )
    return annealing.stable_settings(settings)


def _read_seeds(
    content: dict[str, Any], key: str, default: list[int], path: str
) -> tuple[GridPoint, ...]:
    """The seeds under a key of the YAML.

    A number seeds initial weights and data order. A mapping has the settings of a seed, or a grid
    of them.
    """
    values = content.get(key, default)
    seeds: list[GridPoint] = []
    for value in values:
        if isinstance(value, dict):
            seeds += expand_grid(value, f"{key} of {path}")
        else:
            settings = {"seed_everything": value, DATA_SEED: value}
            seeds.append(GridPoint({"seed": value}, settings))
    check_distinct_seeds(seeds, f"{key} of {path}")
    return tuple(seeds)


def _read_comparisons(
    content: dict[str, Any], arms: list[Arm], path: str
) -> tuple[PlannedComparison, ...]:
    """The comparisons of the YAML; without any, all arms with its `baseline`, if it has one."""
    entries = content.get("comparisons")
    location = f"a comparison of {path}"
    if entries is None:
        location = f"baseline of {path}"
        entries = []
        if content.get("baseline"):
            entries.append({"title": "All arms", "baseline": content["baseline"]})
    arms_by_name = {arm.name: arm for arm in arms}
    all_names = {*arms_by_name, *(arm.base for arm in arms)}
    comparisons = []
    for entry in entries:
        baseline = str(entry.get("baseline"))
        names = set(map(str, entry.get("arms") or arms_by_name))
        unknown = names - all_names
        if baseline not in arms_by_name:
            unknown.add(baseline)
        if unknown:
            raise UserError(
                f"{location} names '{min(unknown)}', which is none of its arms: "
                f"choose among {', '.join(arms_by_name)}"
            )
        members = tuple(arm for arm in arms if arm.is_named_in({*names, baseline}))
        title = str(entry.get("title") or "Comparison")
        comparisons.append(PlannedComparison(title, arms_by_name[baseline], members))
    return tuple(comparisons)

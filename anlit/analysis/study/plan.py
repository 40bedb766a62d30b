"""From a study's YAML to the list of its runs, each with a folder whose name follows from its settings.

    title, question      what the report is headed with
    shared, arms         {configs: [files], settings: {dotted key: value}, tune: grid, vary: grid}
    seeds, tuning_seeds  a number (of initial weights and data order), or a mapping of settings
    budgets              name → settings that are merged over all others for that budget
    comparisons          [{title, baseline, arms: [names]}]; `baseline` alone compares all arms
    sections             what the report shows, see `anlit.analysis.study.sections`

Every point of `vary` is a separate arm and is measured. Every point of `tune` is trained on the tuning seeds; the one
with the lowest validation loss is measured on the seeds.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from anlit.analysis.study.grids import UNCHANGED, Setting, grid, plain
from anlit.errors import UserError
from anlit.reading import read_yaml
from anlit.shipped import configuration_file

KEYS = frozenset(
    {"title", "question", "shared", "arms", "seeds", "tuning_seeds", "equal_tuning", "budgets", "baseline"}
    | {"comparisons", "sections", "pace", "after"}
)
ARM_KEYS = frozenset({"title", "configs", "settings", "tune", "vary"})


@dataclass(frozen=True, eq=False)
class Arm:
    """One configuration that the study measures, at the best of `points`.

    Args:
        name: The name of the YAML's arm, with its point of `vary`.
        base: The YAML's arm.
        title: Its name in tables and plots.
        configs: Configuration files, later ones over earlier ones.
        varied: The point of `vary`.
        settings: The settings that all points share, including those of `varied`.
        points: The tuning grid; a single point is measured as it is.
    """

    name: str
    base: str
    title: str
    configs: tuple[str, ...]
    varied: Setting
    settings: dict[str, Any]
    points: tuple[Setting, ...]

    @property
    def is_tuned(self) -> bool:
        return len(self.points) > 1


@dataclass(frozen=True, eq=False)
class Trial:
    """One `anlit fit`: an arm at a point of its grid, with a seed."""

    arm: Arm
    point: Setting
    seed: Setting

    @property
    def settings(self) -> dict[str, Any]:
        return self.arm.settings | self.point.settings | self.seed.settings

    @cached_property
    def name(self) -> str:
        """The name of the run folder: the choices, and a hash of all settings and configuration files.

        So a run with other settings never has the same name.
        """
        content = [read_config(path) for path in self.arm.configs]
        text = json.dumps([content, self.settings], sort_keys=True, default=str)
        words = [plain(self.arm.name), self.point.name, self.seed.name]
        return "_".join(filter(None, words)) + "-" + hashlib.sha256(text.encode()).hexdigest()[:6]

    def options(self, run_dir: Path) -> list[str]:
        """The options of `anlit fit`, without `--ckpt_path`."""
        files = [part for config in self.arm.configs for part in ("--config", config)]
        settings = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        return [*files, *(f"--{key}={value}" for key, value in settings.items()), f"--run_dir={run_dir}"]


@dataclass(frozen=True, eq=False)
class PlannedComparison:
    """Arms that the report compares with one of them."""

    title: str
    baseline: Arm
    arms: tuple[Arm, ...]


@dataclass(frozen=True, eq=False)
class Study:
    """A study with one budget; `content` is its YAML with the budget merged in."""

    path: str
    budget: str | None
    content: dict[str, Any]
    arms: tuple[Arm, ...]
    seeds: tuple[Setting, ...]
    tuning_seeds: tuple[Setting, ...]
    comparisons: tuple[PlannedComparison, ...] = field(default=())

    @property
    def title(self) -> str:
        return str(self.content.get("title") or Path(self.path).stem)

    @property
    def label(self) -> str:
        """`convergence-cpu`: the file's name and the budget."""
        return "-".join(filter(None, [Path(self.path).stem, self.budget]))

    @property
    def sections(self) -> list[dict[str, Any]]:
        return [one if isinstance(one, dict) else {one: {}} for one in self.content.get("sections") or ["convergence"]]

    def title_of(self, base: str) -> str:
        """The YAML's title of an arm, without its point of `vary`."""
        return str(self.content["arms"][base].get("title") or base)

    def tuning_runs(self) -> list[Trial]:
        """Every point of every tuned arm on the tuning seeds, seed by seed, so that all arms advance together."""
        return [
            Trial(arm, point, seed)
            for seed in self.tuning_seeds
            for arm in self.arms
            if arm.is_tuned
            for point in arm.points
        ]

    def measured_runs(self, selected: dict[str, Setting]) -> list[Trial]:
        """Every arm at its selected point (arm's name → point) on the seeds, without arms that have no point yet.

        The runs are ordered by seed, so that an interrupted study has compared all arms, on fewer seeds.
        """
        return [
            Trial(arm, selected[arm.name], seed) for seed in self.seeds for arm in self.arms if arm.name in selected
        ]


def read_study(path: str, budget: str | None) -> Study:
    """The study in the file `path`, local or shipped, with a budget; None if the file lists no budgets.

    Raises:
        UserError: The file, a configuration file or the budget does not exist, a key is not known, the arms' tuning
            budgets differ without `equal_tuning: false`, a seed both tunes and measures, or nothing would be run.
    """
    content = _with_budget(read_config(path), budget, path)
    if unknown := set(content) - KEYS:
        raise UserError(f"{path} has the unknown key '{min(unknown)}': the known ones are {', '.join(sorted(KEYS))}")
    if not isinstance(content.get("arms"), dict) or not content["arms"]:
        raise UserError(f"{path} lists no arms: give `arms: {{name: {{configs: [files]}}}}`")
    arms = tuple(arm for name, spec in content["arms"].items() for arm in _arms(name, spec, content, path))
    seeds, tuning_seeds = _seeds(content, "seeds", [1], path), _seeds(content, "tuning_seeds", [0], path)
    _refuse_ignored(arms, (*seeds, *tuning_seeds), path)
    study = Study(path, budget, content, arms, seeds, tuning_seeds)
    if not seeds and not study.tuning_runs():
        raise UserError(f"{path} has neither seeds nor anything to tune: give `seeds: [1, 2, 3]`")
    if study.tuning_runs():
        _refuse_tuned_seeds(seeds, tuning_seeds, path)
    if content.get("equal_tuning", True):
        _require_equal_tuning(arms, path)
    return Study(path, budget, content, arms, seeds, tuning_seeds, tuple(_comparisons(content, arms, path)))


def _with_budget(content: Any, budget: str | None, path: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{path} is no study: give a mapping with `arms`")
    budgets = content.get("budgets") or {}
    if budget is None and budgets:
        raise UserError(f"{path} has several budgets: choose one with --budget {'|'.join(map(str, budgets))}")
    if budget is not None and budget not in budgets:
        known = f"choose one of {', '.join(map(str, budgets))}" if budgets else "it lists none, so leave --budget out"
        raise UserError(f"--budget {budget} is none of {path}'s: {known}")
    base = {key: value for key, value in content.items() if key != "budgets"}
    return merged(base, budgets[budget] or {}) if budget is not None else base


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings are merged, other values are replaced, null removes a key."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return {key: value for key, value in result.items() if value is not None or key not in above}


def _arms(name: str, spec: Any, content: dict[str, Any], path: str) -> list[Arm]:
    shared = content.get("shared") or {}
    for where, one in ((f"arm '{name}'", spec), ("shared", shared)):
        if not isinstance(one, dict) or set(one) - ARM_KEYS:
            raise UserError(f"{where} of {path} must be a mapping with keys of {', '.join(sorted(ARM_KEYS))}")
    configs = (*spec.get("configs", ()), *shared.get("configs", ()))
    if not configs:
        raise UserError(f"arm '{name}' of {path} names no configuration files: give `configs: [model/gpt.yaml]`")
    for config in configs:
        configuration_file(config, f"configs of arm '{name}' in {path}:")
    fixed = (shared.get("settings") or {}) | (spec.get("settings") or {})
    points = tuple(grid(spec.get("tune", shared.get("tune")), f"tune of arm '{name}' in {path}"))
    found = []
    for varied in grid(spec.get("vary", shared.get("vary")), f"vary of arm '{name}' in {path}"):
        words = ", ".join(f"{key} {plain(value)}" for key, value in varied.shown.items())
        title = ", ".join(filter(None, [str(spec.get("title") or name), words]))
        full = "_".join(filter(None, [str(name), varied.name]))
        found.append(Arm(full, str(name), title, configs, varied, fixed | varied.settings, points))
    return found


def _seeds(content: dict[str, Any], key: str, default: list[int], path: str) -> tuple[Setting, ...]:
    values = content.get(key, default)
    if not isinstance(values, list):
        raise UserError(f"{key} of {path} is {values!r}, which is no list: write `{key}: [1, 2, 3]`")
    return tuple(map(_seed, values))


def _refuse_ignored(arms: tuple[Arm, ...], seeds: tuple[Setting, ...], path: str) -> None:
    """A seed's settings win over an arm's, whose own would be ignored without a word."""
    for arm in arms:
        given = arm.settings.keys() | {key for point in arm.points for key in point.settings}
        for key in sorted(given & {key for seed in seeds for key in seed.settings}):
            raise UserError(
                f"arm '{arm.name}' of {path} sets {key}, which its seeds set too: leave it out, and give its values "
                "with `seeds` and `tuning_seeds`"
            )


def _refuse_tuned_seeds(seeds: tuple[Setting, ...], tuning_seeds: tuple[Setting, ...], path: str) -> None:
    """A setting that was chosen on a seed is too good on that seed."""
    for seed in seeds:
        for tuned in tuning_seeds:
            common = seed.settings.keys() & tuned.settings.keys()
            same = bool(common) and all(seed.settings[key] == tuned.settings[key] for key in common)
            if same or seed.settings == tuned.settings:
                raise UserError(
                    f"{path} measures on the seed {seed.shown.get('seed', seed.name)}, on which it also tunes: give "
                    "`seeds` and `tuning_seeds` without a common one"
                )


def _seed(value: Any) -> Setting:
    """A number seeds the initial weights and the order of the data; a mapping gives the settings of a seed."""
    if isinstance(value, dict):
        return grid(value, "a seed")[0] if value else UNCHANGED
    return Setting({"seed": value}, {"seed_everything": value, "data.init_args.seed": value})


def _require_equal_tuning(arms: tuple[Arm, ...], path: str) -> None:
    counts = Counter(len(arm.points) for arm in arms)
    if len(counts) > 1:
        told = ", ".join(f"{arm.name} {len(arm.points)}" for arm in arms)
        raise UserError(
            f"the arms of {path} are tuned over different numbers of settings ({told}), which favours some: make them "
            "equal, or allow it with `equal_tuning: false`"
        )


def _comparisons(content: dict[str, Any], arms: tuple[Arm, ...], path: str) -> list[PlannedComparison]:
    named = content.get("comparisons")
    if named is None:
        named = [{"title": "All arms", "baseline": content["baseline"]}] if content.get("baseline") else []
    found, names = [], {name for arm in arms for name in (arm.name, arm.base)}
    for one in named:
        if not isinstance(one, dict) or "baseline" not in one or set(one) - {"title", "baseline", "arms"}:
            raise UserError(f"a comparison of {path} must be a mapping with `baseline`, `title` and `arms`: {one}")
        if unknown := [name for name in one.get("arms") or () if name not in names]:
            raise UserError(
                f"a comparison of {path} names the arm '{unknown[0]}', which is none of its arms: choose among "
                + ", ".join(arm.name for arm in arms)
            )
        members = [arm for arm in arms if one.get("arms") is None or {arm.name, arm.base} & set(one["arms"])]
        base = [arm for arm in members if arm.name == one["baseline"]]
        if not base:
            raise UserError(
                f"a comparison of {path} has the baseline '{one['baseline']}', which is none of its arms: choose one "
                "of " + ", ".join(arm.name for arm in members or arms)
            )
        found.append(PlannedComparison(str(one.get("title") or "Comparison"), base[0], tuple(members)))
    return found


def read_config(name: str) -> Any:
    """The content of a configuration file, local or shipped.

    Raises:
        UserError: The file does not exist, or is no YAML.
    """
    path = configuration_file(name)
    return _parsed(path, Path(path).stat().st_mtime_ns if Path(path).exists() else 0)


@lru_cache(maxsize=256)
def _parsed(path: str, changed: int) -> Any:
    """The file's content, cached until the file changes; callers must not modify it."""
    return read_yaml(path)

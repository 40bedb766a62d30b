"""From a study's YAML, see docs/studies.md, to the list of its runs.

Every point of `vary` is a separate arm and is measured. Every point of `tune` is trained on the tuning seeds; the one
with the lowest validation loss is measured on the seeds. The name of a run's folder follows from its settings.
"""

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from anlit.config.files import configuration_file
from anlit.errors import UserError
from anlit.io.read import check, read_yaml
from anlit.runs.labels import short_names

GRID, LINES, PACE = (dict, list), {str: object}, {"flops_per_second": (int, float), "measured": str}
ARM = {"title": str, "configs": [str], "settings": LINES, "tune": GRID, "vary": GRID}
COMPARISON = {"title": str, "baseline": str, "arms": [str]}
SCHEMA = {
    "title": str, "question": str, "shared": ARM, "arms": {str: ARM}, "seeds": [(int, dict)],
    "tuning_seeds": [(int, dict)], "equal_tuning": bool, "budgets": {str: dict}, "baseline": str,
    "comparisons": [COMPARISON], "sections": [(str, dict)], "pace": PACE, "after": {str: str},
}  # fmt: skip
"""What a study's file may say, see `anlit.io.read.check`; of `grid` and of a section's options the rest is checked."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One point of a grid: short names → values, for tables; dotted keys → values, as `anlit fit` takes them."""

    shown: dict[str, Any]
    settings: dict[str, Any]

    @property
    def words(self) -> str:
        """`lr=0.004, size=d128`, for tables; empty for an empty choice."""
        return ", ".join(f"{key}={plain(value)}" for key, value in self.shown.items())

    @property
    def name(self) -> str:
        """`lr=0.004_size=d128`, for folders."""
        return self.words.replace(", ", "_")


def grid(grids: Any, where: str) -> list[Setting]:
    """All points of a grid, or of a list of grids, each once; one that changes nothing without a grid.

    A grid is the product of its lines: `key: value` and `key: [values]` are values of the setting with that dotted key;
    `name: {choice: {key: value, …}, …}` are named choices that change several settings together. UserError, which says
    `where`, for another form.
    """
    points: dict[str, Setting] = {}
    listed = grids if isinstance(grids, list) else [grids or {}]
    keys = list(dict.fromkeys(key for lines in listed if isinstance(lines, dict) for key in lines))
    for lines in listed:
        require(where, lines, LINES)
        for choices in itertools.product(
            *(_line(key, values, keys, where) for key, values in sorted(lines.items()))
        ):
            shown, settings = ({key: value for choice in choices for key, value in getattr(choice, part).items()}
                               for part in ("shown", "settings"))  # fmt: skip
            points.setdefault(
                json.dumps(settings, sort_keys=True, default=str), Setting(shown, settings)
            )
    if not points:
        raise UserError(
            f"{where} has no values: leave it out, or give such as `{{dotted.key: [1, 2]}}`"
        )
    return list(points.values())


def _line(key: str, values: Any, keys: list[str], where: str) -> list[Setting]:
    if isinstance(values, dict) and "class_path" not in values:
        for name, settings in values.items():
            require(f"the choice {name!r} of '{key}' in {where}", settings, LINES)
        return [Setting({key: name}, settings) for name, settings in values.items()]
    last = key.rsplit(".", 1)[-1]
    is_shared = sum(other.rsplit(".", 1)[-1] == last for other in keys) > 1
    short = (
        "data_seed"
        if key == "data.init_args.seed"
        else short_names(keys)[key]
        if is_shared
        else last
    )
    return [
        Setting({short: value}, {key: value})
        for value in (values if isinstance(values, list) else [values])
    ]


def plain(value: Any) -> str:
    """A value for a folder's name, without characters that are special to shells and file systems."""
    if isinstance(value, dict):
        value = str(value.get("class_path", "set")).rsplit(".", 1)[-1]
    return "".join(
        letter if letter.isalnum() or letter in "._+-=" else "-" for letter in str(value)
    )


@dataclass(frozen=True, eq=False)
class Arm:
    """The YAML's arm `base` at its point `varied` of `vary`, measured at the best of `points`, its tuning grid.

    Later ones of `configs` win over earlier ones, and over them the `settings`, which all points share.
    """

    name: str
    base: str
    title: str
    configs: tuple[str, ...]
    varied: Setting
    settings: dict[str, Any]
    points: tuple[Setting, ...]

    def is_among(self, names: Container[str] | None) -> bool:
        """Whether `names` has its name or that of its entry in the YAML; always if there are none."""
        return names is None or self.name in names or self.base in names

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
        """The name of the run folder: the choices, and a hash of all settings and configuration files."""
        content = [read_config(path) for path in self.arm.configs]
        text = json.dumps([content, self.settings], sort_keys=True, default=str)
        words = [plain(self.arm.name), self.point.name, self.seed.name]
        return "_".join(filter(None, words)) + "-" + hashlib.sha256(text.encode()).hexdigest()[:6]

    def options(self, run_dir: Path) -> list[str]:
        """The options of `anlit fit`, without `--ckpt_path`."""
        files = [part for config in self.arm.configs for part in ("--config", config)]
        settings = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.settings.items()
        }
        return [
            *files,
            *(f"--{key}={value}" for key, value in settings.items()),
            f"--run_dir={run_dir}",
        ]


class PlannedComparison(NamedTuple):
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
    comparisons: tuple[PlannedComparison, ...]

    @property
    def title(self) -> str:
        return str(self.content.get("title") or Path(self.path).stem)

    @property
    def label(self) -> str:
        """`convergence-cpu`: the file's name and the budget."""
        return "-".join(filter(None, [Path(self.path).stem, self.budget]))

    @property
    def sections(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of sections, each with its options."""
        return [(name, options or {}) for entry in self.content.get("sections") or ["convergence"]
                for name, options in (entry if isinstance(entry, dict) else {entry: {}}).items()]  # fmt: skip

    def title_of(self, base: str) -> str:
        """The YAML's title of an arm, without its point of `vary`."""
        return str(self.content["arms"][base].get("title") or base)

    def tuning_runs(self) -> list[Trial]:
        """Every point of every tuned arm on the tuning seeds, seed by seed, so that all arms advance together."""
        tuned = [(arm, point) for arm in self.arms if arm.is_tuned for point in arm.points]
        return [Trial(arm, point, seed) for seed in self.tuning_seeds for arm, point in tuned]

    def measured_runs(self, selected: dict[str, Setting]) -> list[Trial]:
        """Every arm at its selected point (arm's name → point, if it has one yet), seed by seed as well."""
        arms = [arm for arm in self.arms if arm.name in selected]
        return [Trial(arm, selected[arm.name], seed) for seed in self.seeds for arm in arms]


def read_study(path: str, budget: str | None) -> Study:
    """The study in the file `path`, local or shipped, with a budget; None if the file lists no budgets.

    UserError if a file or the budget does not exist, a key is not known, or the study is unfair.
    """
    content = read_config(path)
    require(path, content, SCHEMA, known=True)
    budgets = content.get("budgets") or {None: {}}
    if budget not in budgets:
        known = ", ".join(map(str, filter(None, budgets)))
        fix = (
            f"the budgets {known}: choose one with --budget"
            if known
            else "no budgets: leave --budget out"
        )
        raise UserError(f"{path} has {fix}")
    content = merged(content, budgets[budget] or {})
    require(path, content, SCHEMA, known=True)
    pace = content.get("pace") or {}
    require(f"pace of {path}", pace, PACE, known=True)
    if (rate := pace.get("flops_per_second")) is not None and not 0 < rate < math.inf:
        raise UserError(
            f"pace.flops_per_second of {path} is {rate}: give a number above 0, or leave it out"
        )
    if not content.get("arms"):
        raise UserError(f"{path} lists no arms: give `arms: {{name: {{configs: [files]}}}}`")
    arms = tuple(
        arm for name, spec in content["arms"].items() for arm in _arms(name, spec, content, path)
    )
    seeds, tuning_seeds = (
        _seeds(content, "seeds", [1], path),
        _seeds(content, "tuning_seeds", [0], path),
    )
    study = Study(
        path, budget, content, arms, seeds, tuning_seeds, _comparisons(content, arms, path)
    )
    _refuse_unfair(study)
    return study


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings are merged, other values are replaced, null removes a key."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return {key: value for key, value in result.items() if value is not None or key not in above}


def require(
    where: str, part: Any, schema: dict[Any, Any], known: bool = False, complete: bool = False
) -> None:
    """Raises a UserError if `part` is not as the `schema` says; where `known`, also if it has other keys."""
    try:
        check(part, schema, complete=complete)
    except ValueError as error:
        raise UserError(f"{where} is not as docs/studies.md says: {error}") from error
    # `tune: null` leaves the shared grid out.
    empty = [key for key in part if part[key] is None and key not in ("tune", "vary")]
    if known and empty:
        raise UserError(f"{where} has no value for '{empty[0]}': give one, or leave it out")
    if known and (unknown := sorted({*map(str, part)} - {*schema})):
        listed = ", ".join(sorted(schema)) or "none"
        raise UserError(f"{where} has the unknown key '{unknown[0]}': the known ones are {listed}")


def _arms(name: str, spec: Any, content: dict[str, Any], path: str) -> list[Arm]:
    """The arms of an entry of the YAML, one for each point of its `vary`."""
    shared = content.get("shared") or {}
    require(f"arm '{name}' of {path}", spec, ARM, known=True)
    require(f"shared of {path}", shared, ARM, known=True)
    configs = (*(spec.get("configs") or ()), *(shared.get("configs") or ()))
    for config in configs:
        configuration_file(config, f"configs of arm '{name}' in {path}:")
    fixed = (shared.get("settings") or {}) | (spec.get("settings") or {})
    points = tuple(grid(spec.get("tune", shared.get("tune")), f"tune of arm '{name}' in {path}"))
    arms = []
    for varied in grid(spec.get("vary", shared.get("vary")), f"vary of arm '{name}' in {path}"):
        words = [f"{key} {plain(value)}" for key, value in varied.shown.items()]
        title = ", ".join([str(spec.get("title") or name), *words])
        full = "_".join(filter(None, [str(name), varied.name]))
        arms.append(Arm(full, str(name), title, configs, varied, fixed | varied.settings, points))
    return arms


def _seeds(content: dict[str, Any], key: str, default: list[int], path: str) -> tuple[Setting, ...]:
    """A number seeds initial weights and data order; a mapping has a seed's settings, or those of each point."""
    values = default if content.get(key) is None else content[key]
    grids = (grid(value, f"{key} of {path}") if isinstance(value, dict)
             else [Setting({"seed": value}, {"seed_everything": value, "data.init_args.seed": value})]
             for value in values)  # fmt: skip
    seeds = tuple(itertools.chain.from_iterable(grids))
    keys = [
        {name.replace(".init_args", ""): str(value) for name, value in seed.settings.items()}
        for seed in seeds
    ]
    pairs = [
        (own.get("seed_everything"), own.get("data.seed")) for own in keys
    ]  # `Run.seeds`, which pairs runs
    if twice := [
        seed.name for seed, pair in zip(seeds, pairs, strict=True) if pairs.count(pair) > 1
    ]:
        raise UserError(f"{key} of {path} has {twice[0]} and {twice[1]}, which do not differ in seed_everything or "
                        "data.init_args.seed, by which runs are paired: leave one out, or give it others")  # fmt: skip
    return seeds


def _comparisons(
    content: dict[str, Any], arms: tuple[Arm, ...], path: str
) -> tuple[PlannedComparison, ...]:
    """Those of the YAML, or the one of all arms with its `baseline`, if it has one."""
    all_arms = (
        [{"title": "All arms", "baseline": content["baseline"]}] if content.get("baseline") else []
    )
    comparisons, named = [], {arm.name: arm for arm in arms}
    planned = content.get("comparisons")
    where = f"baseline of {path}" if planned is None else f"a comparison of {path}"
    for entry in all_arms if planned is None else planned:
        require(where, entry, COMPARISON, known=True)
        chosen, baseline = {*map(str, entry.get("arms") or named)}, str(entry.get("baseline"))
        if unknown := {baseline} - {*named} | chosen - {*named, *(arm.base for arm in arms)}:
            raise UserError(f"{where} names '{min(unknown)}', which is none of its arms: choose among "
                            + ", ".join(named))  # fmt: skip
        members = tuple(arm for arm in arms if arm.is_among({*chosen, baseline}))
        comparisons.append(
            PlannedComparison(str(entry.get("title") or "Comparison"), named[baseline], members)
        )
    return tuple(comparisons)


def _refuse_unfair(study: Study) -> None:
    """Raises a UserError if two arms have one name or title, nothing would be run, a setting would be ignored, a seed
    both tunes and measures, or grids have different sizes without `equal_tuning: false`.
    """
    path, seeds, tuning_seeds = study.path, study.seeds, study.tuning_seeds
    bases = dict.fromkeys(arm.base for arm in study.arms)
    for own in (
        [arm.name for arm in study.arms],
        [arm.title for arm in study.arms],
        [*map(study.title_of, bases)],
    ):
        if twice := [each for each, count in Counter(own).items() if count > 1]:
            raise UserError(f"{path} has two arms with the name or title '{twice[0]}', which a report would mix up: "
                            "give each its own")  # fmt: skip
    seeded = {key for seed in (*seeds, *tuning_seeds) for key in seed.settings}
    for arm in study.arms:  # a seed's settings win over an arm's
        for key in sorted(
            seeded & {*arm.settings, *(key for point in arm.points for key in point.settings)}
        ):
            raise UserError(f"arm '{arm.name}' of {path} sets {key}, which its seeds set too: leave it out, and give "
                            "its values with `seeds` and `tuning_seeds`")  # fmt: skip
    is_tuned = any(arm.is_tuned for arm in study.arms)
    if is_tuned and not tuning_seeds:
        raise UserError(f"{path} has grids to tune and no tuning_seeds: give `tuning_seeds: [0]`")
    if not seeds and not is_tuned:
        raise UserError(f"{path} has neither seeds nor anything to tune: give `seeds: [1, 2, 3]`")
    for seed, tuned in itertools.product(seeds, tuning_seeds) if is_tuned else ():
        ours, theirs = seed.settings.items(), tuned.settings.items()
        if ours <= theirs or theirs <= ours:
            raise UserError(f"{path} measures on the seed {seed.shown.get('seed', seed.name)}, on which it also tunes: "
                            "give `seeds` and `tuning_seeds` without a common one")  # fmt: skip
    if (
        study.content.get("equal_tuning") is not False
        and len({len(arm.points) for arm in study.arms}) > 1
    ):
        counts = ", ".join(f"{arm.name} {len(arm.points)}" for arm in study.arms)
        raise UserError(f"the arms of {path} are tuned over different numbers of settings ({counts}), which favours "
                        "some: make them equal, or allow it with `equal_tuning: false`")  # fmt: skip


def read_config(name: str) -> Any:
    """The content of a configuration file, local or shipped; UserError if there is none, or it is no YAML."""
    path = configuration_file(name)
    return _parsed(path, Path(path).stat().st_mtime_ns if Path(path).exists() else 0)


@lru_cache(maxsize=256)
def _parsed(path: str, changed: int) -> Any:
    """The file's content, cached until the file changes; callers must not modify it."""
    return read_yaml(path)

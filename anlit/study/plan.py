"""The arms and runs of a study.

Every point of `vary` is a separate arm and is measured. Every point of `tune` is trained on the
tuning seeds. It is a point of a grid, or drawn from ranges (`search.py`). The point with the lowest
validation loss is measured on the seeds. The name of a run's folder follows from its settings.

With `anneal` a measured run keeps its rate. Further runs branch from its checkpoints, and their
rate falls to 0. See `anneal.py`.
"""

import hashlib
import json
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from anlit.config.files import configuration_file
from anlit.config.labels import CONFIG
from anlit.io.read import read_yaml
from anlit.study.anneal import SCHEDULE, Annealing, annealed_schedule, annealed_settings
from anlit.study.grid import GridPoint, safe_name
from anlit.study.search import Search, SearchRange

LABELS = ("name", "tags")
"""Settings of `anlit fit` that label a run, and change nothing of it."""


@dataclass(frozen=True, eq=False)
class Arm:
    """An arm of a study: an arm in the YAML at a point of its `vary`."""

    name: str
    base: str
    """Name of the arm in the YAML."""
    title: str
    configs: tuple[str, ...]
    """Configuration files. Later files win over earlier files."""
    varied: GridPoint
    settings: dict[str, Any]
    """Settings of all points. They win over the configuration files."""
    points: tuple[GridPoint, ...]
    """The tuning grid, or the draws. The arm is measured at the best point."""
    ranges: tuple[SearchRange, ...] = ()
    """The ranges that its points are drawn from; none for a grid."""

    def is_named_in(self, names: Container[str] | None) -> bool:
        """Whether `names` has its name or its name in the YAML; True for None."""
        return names is None or self.name in names or self.base in names

    @property
    def is_tuned(self) -> bool:
        return len(self.points) > 1

    @property
    def space(self) -> str:
        """`lr 0.001 … 0.03 (log), batch_size 2 or 4 or 16`: where its points are from."""
        if not self.ranges:
            return f"a grid of {len(self.points)} settings"
        texts = [search_range.label for search_range in self.ranges]
        names = {search_range.name for search_range in self.ranges}
        for name in self.points[0].shown:
            if name not in names:
                values = dict.fromkeys(safe_name(point.shown[name]) for point in self.points)
                # Short texts first, so that numbers are in order.
                ordered = sorted(values, key=lambda value: (len(value), value))
                texts.append(f"{name} {' or '.join(ordered)}")
        return ", ".join(texts)


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """An `anlit fit` that a study needs: an arm at a point of its grid, with a seed."""

    arm: Arm
    point: GridPoint
    seed: GridPoint

    @property
    def settings(self) -> dict[str, Any]:
        return self.arm.settings | self.point.settings | self.seed.settings

    @property
    def label(self) -> str:
        """`seed=1`: which of the arm's measured runs it is."""
        return self.seed.name

    @property
    def n_inherited(self) -> int:
        """Optimizer steps that another run has taken for it."""
        return 0

    @cached_property
    def name(self) -> str:
        """The name of the run folder: the choices, and a hash of settings and configurations."""
        content = [_without_labels(read_config(path)) for path in self.arm.configs]
        settings = _without_labels(self.settings)
        text = json.dumps([content, settings], sort_keys=True, default=str)
        names = filter(None, [safe_name(self.arm.name), self.point.name, self.seed.name])
        return "_".join(names) + "-" + hashlib.sha256(text.encode()).hexdigest()[:6]

    @property
    def hash(self) -> str:
        """The hash in the name, which runs of other studies with the same settings share."""
        return hash_in_name(self.name)

    def options(self, run_dir: Path) -> list[str]:
        """The options of `anlit fit`, without `--ckpt_path`."""
        options: list[str] = []
        for config in self.arm.configs:
            options += ["--config", config]
        for key, value in self.settings.items():
            text = value if isinstance(value, str) else json.dumps(value)
            options.append(f"--{key}={text}")
        return [*options, f"--run_dir={run_dir}"]


def _without_labels(content: Any) -> Any:
    """The content of a configuration without the name and the tags of a run."""
    if not isinstance(content, dict):
        return content
    return {key: value for key, value in content.items() if key not in LABELS}


@dataclass(frozen=True, eq=False)
class AnnealedRun(PlannedRun):
    """The end of a measured run: from a checkpoint on, the rate falls to 0."""

    stable: PlannedRun
    """The run that it branches from."""
    n_stable: int
    """Optimizer steps of the checkpoint that it branches from."""
    max_steps: int
    """Optimizer steps at its end."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the stable run, with another length, without its schedule."""
        return annealed_settings(super().settings, self.max_steps)

    @property
    def label(self) -> str:
        return f"{self.seed.name}_annealed={self.max_steps}"

    @property
    def n_inherited(self) -> int:
        return self.n_stable

    @cached_property
    def name(self) -> str:
        """The stable run's name with the length, and a hash of both."""
        stable_name, _, stable_hash = self.stable.name.rpartition("-")
        text = f"{stable_hash} {self.n_stable} {self.max_steps}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        return f"{stable_name}_annealed={self.max_steps}-{digest}"

    def options(self, run_dir: Path) -> list[str]:
        """The options of `anlit fit`. The schedule is read from the folder of the stable run."""
        config = run_dir.parent / self.stable.name / CONFIG
        schedule = annealed_schedule(config, self.n_stable)
        return [*super().options(run_dir), f"--{SCHEDULE}={json.dumps(schedule)}"]


def hash_in_name(name: str) -> str:
    """The hash at the end of a run folder's name."""
    return name.rpartition("-")[2]


class PlannedComparison(NamedTuple):
    """Arms that the report compares with a baseline."""

    title: str
    baseline: Arm
    arms: tuple[Arm, ...]


@dataclass(frozen=True, eq=False)
class Study:
    """A study with a budget."""

    path: str
    budget: str | None
    content: dict[str, Any]
    """The YAML with the budget merged in."""
    arms: tuple[Arm, ...]
    seeds: tuple[GridPoint, ...]
    tuning_seeds: tuple[GridPoint, ...]
    comparisons: tuple[PlannedComparison, ...]
    annealing: Annealing | None = None
    """The lengths of the annealed runs. None without `anneal`."""
    search: Search | None = None
    """How points are drawn from ranges. None without `search`."""

    @property
    def title(self) -> str:
        return str(self.content.get("title") or Path(self.path).stem)

    @property
    def label(self) -> str:
        """`convergence-cpu`: the file's name and the budget."""
        return "-".join(filter(None, [Path(self.path).stem, self.budget]))

    @property
    def sections(self) -> list[tuple[str, dict[str, Any]]]:
        """Names of sections with their options."""
        sections = []
        for entry in self.content.get("sections") or ["convergence"]:
            options_by_name = entry if isinstance(entry, dict) else {entry: {}}
            for name, options in options_by_name.items():
                sections.append((name, options or {}))
        return sections

    def title_of(self, base: str) -> str:
        """The YAML's title of an arm, without its point of `vary`."""
        return str(self.content["arms"][base].get("title") or base)

    def tuning_runs(self) -> list[PlannedRun]:
        """Every point of every tuned arm on the tuning seeds.

        They are in order of the seeds, so that all arms advance together.
        """
        runs = []
        for seed in self.tuning_seeds:
            for arm in self.arms:
                if arm.is_tuned:
                    runs += [PlannedRun(arm, point, seed) for point in arm.points]
        return runs

    def measuring_runs(self, selected: dict[str, GridPoint]) -> list[PlannedRun]:
        """Every arm at its selected point on the seeds, in order of the seeds.

        `selected` has the points by arm name. An arm without a point is left out.
        """
        runs = []
        for seed in self.seeds:
            for arm in self.arms:
                if arm.name in selected:
                    runs.append(PlannedRun(arm, selected[arm.name], seed))
        return runs

    def annealed_runs(self, selected: dict[str, GridPoint]) -> list[AnnealedRun]:
        """The runs that branch from the measured runs, in the same order; none without `anneal`."""
        runs: list[AnnealedRun] = []
        if self.annealing is None:
            return runs
        for stable in self.measuring_runs(selected):
            for max_steps in self.annealing.max_steps:
                n_stable = self.annealing.n_stable(max_steps)
                run = AnnealedRun(
                    stable.arm, stable.point, stable.seed, stable, n_stable, max_steps
                )
                runs.append(run)
        return runs


def read_config(name: str) -> Any:
    """Read a configuration file, local or shipped; callers must not modify the content.

    Raises:
        UserError: There is no such file, or it is not YAML.
    """
    path = configuration_file(name)
    change_time = Path(path).stat().st_mtime_ns if Path(path).exists() else 0
    return _parse_cached(path, change_time)


@lru_cache(maxsize=256)
def _parse_cached(path: str, change_time: int) -> Any:
    """The file's content, cached until the file changes."""
    return read_yaml(path)

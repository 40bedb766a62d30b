"""Groups: runs of one configuration with different seeds, each group with a unique label."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.config.labels import mapping
from anlit.config.schema import PATHS, setting_of
from anlit.errors import UserError
from anlit.runs.callbacks import learning_callbacks
from anlit.runs.folders import Curve, Run
from anlit.runs.labels import NULL_VALUES, common_name, unique_labels
from anlit.runs.measure import NATS_PER_TOKEN, Measure

ATTENTION = "model.init_args.attention"


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same `settings`, which map dotted keys to values.

    Losses and curves are in the units of `measure`.
    """

    label: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]
    measure: Measure = NATS_PER_TOKEN

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs behind every number: the complete runs, or without any, the comparable runs.

        If runs have the same seeds, the one that started last counts: they are copies, or not
        independent.
        """
        complete = [run for run in self.runs if run.complete]
        candidates = complete or [run for run in self.runs if run.comparable]
        return tuple(last_of_seeds(candidates))

    @property
    def lost(self) -> tuple[Run, ...]:
        """A run for each seed whose runs have all failed or diverged.

        It counts as a seed, without a loss.
        """
        counted_seeds = {run.seeds for run in self.counted}
        lost = [run for run in self.runs if run.lost and run.seeds not in counted_seeds]
        last_by_seeds = {run.seeds: run for run in lost}
        return tuple(last_by_seeds.values())

    @property
    def unfinished(self) -> bool:
        """Whether the numbers of this group come from runs that have not ended."""
        return not any(run.complete for run in self.runs)

    @property
    def architecture(self) -> str:
        return self.runs[0].architecture

    @property
    def key(self) -> str:
        """A hash of the settings, which identifies the configuration in other files."""
        return sha256(_as_json(self.settings).encode()).hexdigest()

    def final_losses(self) -> list[float | None]:
        """Last validation loss of each counted run, and None for each lost run."""
        losses: list[float | None] = [self.measure.final_loss_of(run) for run in self.counted]
        return losses + [None] * len(self.lost)

    def loss_by_seed(self) -> dict[Any, float | None]:
        """Final loss by the seeds of model and data order. None for a lost run."""
        losses: dict[Any, float | None] = {}
        for run in self.counted:
            losses[run.seeds] = self.measure.final_loss_of(run)
        return losses | dict.fromkeys((run.seeds for run in self.lost), None)

    def seeded_curves(self) -> list[tuple[Any, Curve | None]]:
        """Seeds and curve, without NaN points, of each counted run.

        Seeds and None of each lost run.
        """
        curves: list[tuple[Any, Curve | None]] = []
        for run in self.counted:
            curves.append((run.seeds, self.measure.curve_of(run).finite()))
        for run in self.lost:
            curves.append((run.seeds, None))
        return curves

    def mean(self) -> tuple[Curve, NDArray[np.float64]]:
        """`mean_curve` of the counted runs."""
        return mean_curve([self.measure.curve_of(run).finite() for run in self.counted])


def last_of_seeds(runs: Iterable[Run]) -> list[Run]:
    """The run that started last, of all with the same seeds; without a known seed, the same curve.

    Of copies, and of runs without a recorded time, the last in order.
    """
    last_runs: dict[Any, Run] = {}
    for run in runs:
        key = _seeds_or_curve(run)
        if key not in last_runs or not _started_before(run, last_runs[key]):
            last_runs[key] = run
    return list(last_runs.values())


def _started_before(run: Run, other_run: Run) -> bool:
    """Whether a run is known to have started before another. Folders tell no time."""
    if run.started is None or other_run.started is None:
        return False
    return run.started < other_run.started


def _seeds_or_curve(run: Run) -> Any:
    if run.seed is not None:
        return run.seeds
    if len(run.curve) > 0:
        return run.curve.tokens.tobytes(), run.curve.loss.tobytes()
    return run.folder


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order of their first run; runs without a configuration are in none."""
    members: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run.config:
            run_settings = learned_settings(run)
            key = _as_json(run_settings)
            members.setdefault(key, []).append(run)
            settings[key] = run_settings
    first_runs = [group[0] for group in members.values()]
    labels = unique_labels(
        [_name_of(group) for group in members.values()],
        _with_names_of_weights(list(members.values()), list(settings.values())),
        [run.folder for run in first_runs],
    )
    groups = []
    for label, key in zip(labels, members, strict=True):
        groups.append(Group(label, tuple(members[key]), settings[key]))
    return groups


def _with_names_of_weights(
    members: Sequence[Sequence[Run]], settings: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Settings for labels, where a path names the first weights in place of their digits.

    The runs of a group may begin from one run per seed, `base-s1` and `base-s2`: then it is `base`.
    Digits stay if two groups would have the same name for different weights.
    """
    names: list[str | None] = []
    for runs in members:
        paths = [run.config.get("initial_weights") for run in runs]
        known_paths = [_short_path(path) for path in paths if isinstance(path, str)]
        names.append(common_name(known_paths) if known_paths else None)
    identities = [group.get("initial_weights") for group in settings]
    if len(set(zip(names, identities, strict=True))) > len(set(names)):
        return list(settings)
    named_settings = []
    for name, group in zip(names, settings, strict=True):
        named_settings.append(group | {"initial_weights": name} if name else group)
    return named_settings


def _short_path(path: str) -> str:
    """`base` for runs/base, and `base/last` for runs/base/checkpoints/last.ckpt."""
    parts = PurePath(path).parts
    if path.endswith(".ckpt") and len(parts) >= 3:
        return f"{parts[-3]}/{PurePath(path).stem}"
    return parts[-1]


def counted_runs(groups: Iterable[Group]) -> list[Run]:
    """The counted runs of all groups."""
    runs: list[Run] = []
    for group in groups:
        runs += group.counted
    return runs


def _name_of(runs: Sequence[Run]) -> str:
    """The name that the runs of a configuration have in common, else architecture and attention."""
    names = [run.name for run in runs if run.name]
    if len(names) == len(runs):
        name = common_name(names)
        if name:
            return name
    return f"{runs[0].architecture}, {runs[0].attention}"


def learned_settings(run: Run) -> dict[str, Any]:
    """The configuration as dotted keys, without nulls and hidden settings.

    A recorded hash of the data replaces the paths. Each seed may have its own initial weights. So
    their path becomes `Run.begun_from`, or True if that was not recorded. Plain attention that is
    written out is the same as null, and so are `NULL_VALUES`.
    """
    trainer = mapping(run.config.get("trainer"))
    callbacks = learning_callbacks(trainer.get("callbacks"))
    config = run.config | {"trainer": trainer | {"callbacks": callbacks}}
    settings: dict[str, Any] = {}
    for key, value in flatten(config):
        if key == "initial_weights":
            settings[key] = True
        elif _is_learned(key, value, run):
            settings[key] = value
    if run.begun_from:
        settings["initial_weights"] = run.begun_from
    hashes = {"data.content": run.content_hash, "data.tokenizer": run.tokenizer_hash}
    for key, sha in hashes.items():
        if sha:
            settings[key] = sha[:12]
    return settings


def callbacks_of(group: Group) -> list[str]:
    """The names of the callbacks that may change what a group's runs learn."""
    names = []
    for key in group.settings:
        if key.startswith("trainer.callbacks.") and key.endswith(".class_path"):
            names.append(key.split(".")[2])
    return names


def _is_learned(key: str, value: Any, run: Run) -> bool:
    """Whether a setting belongs to the configuration of a run."""
    if run.attention == "plain" and f"{key}.".startswith(f"{ATTENTION}."):
        return False
    if str(value) == NULL_VALUES.get(key):
        return False
    setting = setting_of(key)
    is_data_path = setting.role is PATHS and key.startswith("data.")
    return not setting.hidden and not (is_data_path and run.content_hash)


def mean_curve(curves: Sequence[Curve]) -> tuple[Curve, NDArray[np.float64]]:
    """Pointwise mean over runs of a curve of n points, and lowest and highest loss, (2, n).

    A standard deviation of two or three runs would reach beyond all of them. The mean has all
    validation points in the range of tokens that every curve covers. UserError if there is none.
    """
    if len(curves) == 1:
        return curves[0], np.stack([curves[0].loss, curves[0].loss])
    low = max(curve.tokens[0] for curve in curves)
    high = min(curve.tokens[-1] for curve in curves)
    grid = np.unique(np.concatenate([curve.tokens for curve in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    if len(grid) == 0:
        raise UserError(
            "runs that differ only in seeds have no range of tokens in common: leave out the run "
            "that ended early"
        )
    losses = []
    seconds = []
    for curve in curves:
        losses.append(np.interp(grid, curve.tokens, curve.loss))
        seconds.append(np.interp(grid, curve.tokens, curve.seconds))
    mean = Curve(grid, np.mean(seconds, 0), np.mean(losses, 0))
    return mean, np.stack([np.min(losses, 0), np.max(losses, 0)])


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value.

    None is left out, a list becomes JSON.
    """
    if isinstance(value, dict):
        pairs = []
        for key, inner in value.items():
            pairs += flatten(inner, f"{prefix}{key}.")
        return pairs
    if value is None:
        return []
    if isinstance(value, list):
        value = _as_json(value)
    return [(prefix.removesuffix("."), value)]


def records(runs: Iterable[Run], name: str) -> list[dict[str, Any]]:
    """The distinct dictionaries that the runs, or their launches, recorded under `name`."""
    texts = set()
    for run in runs:
        for record in (run.record, *run.launches):
            value = mapping(record.get(name))
            if value:
                texts.add(_as_json(value))
    return [json.loads(text) for text in sorted(texts)]


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

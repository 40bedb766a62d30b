"""Groups: runs of one configuration with different seeds, each with a unique label."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anlit.config.labels import init_args, mapping
from anlit.errors import UserError
from anlit.runs.folders import Curve, Run
from anlit.runs.labels import unique_labels

UNLEARNED = (
    "seed_everything", "run_dir", "ckpt_path", "checkpoint_every_n_steps", "weights_only", "verbose", "accept_changes",
    "data.init_args.seed", "data.init_args.num_workers", "data.init_args.cache_gb", "data.init_args.val_batch_size",
    "trainer.logger", "trainer.default_root_dir", "trainer.profiler", "trainer.enable_checkpointing",
    "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps",
    "trainer.num_sanity_val_steps", "trainer.accelerator", "trainer.strategy", "trainer.max_time",
    "trainer.limit_test_batches", "model.init_args.runtime.compile", "model.init_args.runtime.recompute_every",
    "model.init_args.runtime.meta_init", "model.init_args.kernel", "model.init_args.backend",
)  # fmt: skip
"""Settings of where a run is written, of how it is logged and computed, and of the order of its data.

In results that earlier commits recorded, `kernel` is `backend`.
"""
WATCHING = {
    "AttentionStatistics", "BestCheckpoint", "FiniteCheckpoints", "LastCheckpoint", "NormMonitor", "RandomState",
    "RunProgress", "RunRecord", "StopOnNonFinite", "Throughput", "TrainingDynamics", "WholeSteps",
    "Checkpoint", "DeviceStatsMonitor", "LearningRateMonitor", "ModelCheckpoint", "ModelSummary",
    "OnExceptionCheckpoint", "ProgressBar", "RichModelSummary", "RichProgressBar", "SpikeDetection",
    "ThroughputMonitor", "Timer", "TQDMProgressBar",
}  # fmt: skip
"""Callbacks of anlit's and Lightning's that change nothing of what is learned; all others may."""
PATHS = ("path", "paths", "folder", "root", "dir", "source")


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same `settings`, which map dotted keys to values."""

    label: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs behind every number: the complete ones, or, if there is none, those that can be compared so far.

        Of runs with the same seeds and the same curve only the first counts: the others are copies, or repeat it.
        """
        runs = [run for run in self.runs if run.complete] or [
            run for run in self.runs if run.comparable
        ]
        one = {
            (run.seeds, run.curve.tokens.tobytes(), run.curve.loss.tobytes()): run
            for run in runs[::-1]
        }
        return tuple(run for run in runs if run in one.values())

    @property
    def lost(self) -> tuple[Run, ...]:
        """A run for each seed whose runs have all failed or diverged. It counts as a seed, without a loss."""
        counted = {run.seeds for run in self.counted}
        return tuple(
            {run.seeds: run for run in self.runs if run.lost and run.seeds not in counted}.values()
        )

    @property
    def unfinished(self) -> bool:
        """The numbers of this group come from runs that have not ended."""
        return not any(run.complete for run in self.runs)

    @property
    def architecture(self) -> str:
        return self.runs[0].architecture

    @property
    def key(self) -> str:
        """A hash of the settings, which identifies the configuration in other files."""
        return sha256(json.dumps(self.settings, sort_keys=True, default=str).encode()).hexdigest()

    def final_losses(self) -> list[float | None]:
        """Last validation loss of each counted run, nats per token, and None for each lost one."""
        return [*(run.final_loss for run in self.counted), *(None for _ in self.lost)]

    def loss_by_seed(self) -> dict[Any, float | None]:
        """Final loss by the seeds of model and data order; None for a lost one."""
        return {run.seeds: run.final_loss for run in self.counted} | {
            run.seeds: None for run in self.lost
        }

    def seeded_curves(self) -> list[tuple[Any, Curve | None]]:
        """Seeds and curve, without its NaN points, of each counted run, and None in place of a lost one's curve."""
        return [
            *((run.seeds, run.curve.finite()) for run in self.counted),
            *((run.seeds, None) for run in self.lost),
        ]

    def mean(self) -> tuple[Curve, NDArray[np.float64]]:
        """`mean_curve` of the counted runs."""
        return mean_curve([run.curve.finite() for run in self.counted])


def group_runs(runs: list[Run]) -> list[Group]:
    """Groups in the order of their first run; runs without a configuration are in none."""
    members: dict[str, list[Run]] = {}
    for run in (run for run in runs if run.config):
        members.setdefault(
            json.dumps(learned_settings(run), sort_keys=True, default=str), []
        ).append(run)
    settings = [learned_settings(first) for first, *_ in members.values()]
    firsts = [first for first, *_ in members.values()]
    names = [f"{first.architecture}, {first.attention}" for first in firsts]
    labels = unique_labels(names, settings, [first.folder for first in firsts])
    return [Group(label, tuple(group), own)
            for label, group, own in zip(labels, members.values(), settings, strict=True)]  # fmt: skip


def learned_settings(run: Run) -> dict[str, Any]:
    """The configuration as dotted keys, without nulls and without settings that do not change learning.

    A recorded hash of the data replaces the paths; initial weights are True, because each seed has its own.
    """
    plain = ("model.init_args.attention",) if run.attention == "plain" else ()  # the same as null
    unlearned = tuple(f"{key}." for key in UNLEARNED + plain)
    kept = {}
    trainer = mapping(run.config.get("trainer"))
    callbacks = _teaching(trainer.get("callbacks"))
    for key, value in flatten(run.config | {"trainer": trainer | {"callbacks": callbacks}}):
        is_path = key.startswith("data.") and key.rsplit(".", 1)[-1].rsplit("_", 1)[-1] in PATHS
        if (
            value is not None
            and not f"{key}.".startswith(unlearned)
            and not (is_path and run.content_hash)
        ):
            kept[key] = True if key == "initial_weights" else value
    hashes = {"data.content": run.content_hash, "data.tokenizer": run.tokenizer_hash}
    return kept | {key: value[:12] for key, value in hashes.items() if value}


def _teaching(callbacks: Any) -> str | None:
    """The callbacks that may change what is learned, `LossGuard(patience=3)`; None without any."""
    words = []
    for each in callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else ():
        path = str(mapping(each).get("class_path"))
        name = path.rpartition(".")[2]
        if not path.startswith(("anlit.", "lightning.")) or name not in WATCHING:
            settings = ", ".join(f"{key}={value}" for key, value in init_args(each).items())
            words.append(f"{name}({settings})")
    return ", ".join(words) or None


def mean_curve(curves: list[Curve]) -> tuple[Curve, NDArray[np.float64]]:
    """Pointwise mean over runs and the sample standard deviation of the loss (0 for one run).

    It has all validation points in the range of tokens that every curve covers; UserError if there is none.
    """
    if len(curves) == 1:
        return curves[0], np.zeros(len(curves[0]))
    low, high = max(curve.tokens[0] for curve in curves), min(curve.tokens[-1] for curve in curves)
    grid = np.unique(np.concatenate([curve.tokens for curve in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    if len(grid) == 0:
        raise UserError("Runs that differ only in seeds have no range of tokens in common: leave out the one that "
                        "ended early.")  # fmt: skip
    losses, seconds = (np.stack([np.interp(grid, curve.tokens, getattr(curve, name)) for curve in curves])
                       for name in ("loss", "seconds"))  # fmt: skip
    return Curve(grid, seconds.mean(0), losses.mean(0)), losses.std(0, ddof=1)


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as pairs of a dotted name and a value; None is left out, a list becomes JSON."""
    if isinstance(value, dict):
        return [pair for key, below in value.items() for pair in flatten(below, f"{prefix}{key}.")]
    if value is None:
        return []
    if isinstance(value, list):
        value = json.dumps(value, sort_keys=True, default=str)
    return [(prefix.removesuffix("."), value)]


def records(runs: Iterable[Run], name: str) -> list[dict[str, Any]]:
    """The distinct dictionaries that the runs, or their launches, recorded under `name`."""
    values = [mapping(part.get(name)) for run in runs for part in (run.record, *run.launches)]
    texts = {json.dumps(value, sort_keys=True, default=str) for value in values if value}
    return [json.loads(text) for text in sorted(texts)]

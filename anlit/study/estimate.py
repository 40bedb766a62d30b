"""Tokens and hours of a study's runs, estimated from its YAML before anything starts."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from anlit.config.batch_ramp import configured_ramp
from anlit.config.labels import as_list, init_args, mapping, n_devices
from anlit.config.run_tokens import planned_tokens, tokens_per_micro_batch
from anlit.study.grid import GridPoint
from anlit.study.plan import Arm, PlannedRun, Study, read_config
from anlit.study.read_study import merge

DEFAULT_SIZES = {"vocab_size": 50_304, "context_length": 2048, "n_layers": 12, "d_model": 768}
"""Defaults of the three architectures. The vocabulary is GPT-2's."""
SECONDS_TO_START = 10.0
"""The time for imports, opening the data and the first step."""


class Cost(NamedTuple):
    """The cost of a run."""

    tokens: float
    parameters: float
    flops: float
    """6 per weight and token, and 12·d per layer and visible key."""


def estimate_cost(run: PlannedRun) -> Cost:
    """Estimate the cost of a run from its configuration; an annealed run costs its decay alone.

    Each sequence counts as a single document, which gives an upper bound.
    """
    config = merge_configuration(run)
    model = init_args(config.get("model"))
    data = init_args(config.get("data"))
    trainer = mapping(config.get("trainer"))
    sizes: dict[str, Any] = dict(DEFAULT_SIZES)
    for key, value in (*data.items(), *model.items()):
        if value is not None:
            sizes[key] = value
    d = sizes["d_model"]
    n_layers = sizes["n_layers"]
    length = sizes["context_length"]
    embedding = sizes["vocab_size"] * d
    d_ff = sizes.get("d_ff") or 4 * d
    linear = n_layers * (4 * d * d + 3 * d * d_ff) + embedding
    n_ranks = n_devices(trainer.get("devices", 1)) * trainer.get("num_nodes", 1)
    micro_batch_tokens = tokens_per_micro_batch(length, data, n_ranks)
    tokens = planned_tokens(config, micro_batch_tokens, linear + embedding) or 0.0
    if run.n_inherited:
        tokens -= micro_batch_tokens * configured_ramp(trainer).total(run.n_inherited)
    flops = tokens * (6.0 * linear + 6.0 * n_layers * d * (length + 1))
    return Cost(tokens, linear + embedding, flops)


def describe_plan(
    study: Study, jobs: int, selected: dict[str, GridPoint], ended: dict[str, str]
) -> str:
    """The text of `--dry_run`: the runs by arm and phase, tokens and hours of the remaining runs.

    Args:
        study: The study.
        jobs: Runs at the same time.
        selected: The points to measure, by arm name, of arms whose tuning has ended.
        ended: Why a run is not needed any more, by run name.
    """
    pace = mapping(study.content.get("pace"))
    rate = float(pace.get("flops_per_second") or 0)
    lines = [f"{study.title} ({study.label})"]
    if study.search is not None:
        lines.append(f"search: {study.search.label}")
    for arm in study.arms:
        lines.append(f"  {arm.name}: {_describe_arm(study, arm)}")
    first_points = {arm.name: arm.points[0] for arm in study.arms}
    points = first_points | selected
    phases: dict[str, Sequence[PlannedRun]] = {
        "tuning": study.tuning_runs(),
        "measuring": study.measuring_runs(points),
    }
    if study.annealing is not None:
        phases["annealing"] = study.annealed_runs(points)
    total_hours = 0.0
    for phase, runs in phases.items():
        costs = [estimate_cost(run) for run in runs if run.name not in ended]
        tokens = sum(cost.tokens for cost in costs)
        line = f"{phase}: {len(costs)} runs, {tokens:,.0f} tokens"
        if rate:
            seconds = sum(cost.flops / rate + SECONDS_TO_START for cost in costs)
            hours = seconds / 3600 / jobs
            total_hours += hours
            line += f", about {hours:.2f} h" if hours else ""
        counts = Counter(ended[run.name] for run in runs if run.name in ended)
        if counts:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
            line += f" (of {len(runs)}: {reasons})"
        lines.append(line)
    if rate:
        source = pace.get("measured") or ""
        lines.append(
            f"estimate: {total_hours:.2f} h with --jobs {jobs}, each run at {rate:.3g} FLOP/s "
            f"({source})"
        )
    else:
        lines.append(
            "estimate: none, because the study's YAML has no `pace: {flops_per_second: …}` for "
            "this budget"
        )
    return "\n".join(lines)


def _describe_arm(study: Study, arm: Arm) -> str:
    seeds = f"{len(study.seeds)} seeds"
    if not arm.is_tuned:
        return f"{seeds}, no tuning"
    points = f"{len(arm.points)} settings"
    if arm.ranges:
        points = f"{len(arm.points)} draws of {arm.space}"
    return f"{points} × {len(study.tuning_seeds)} tuning seeds, the best on {seeds}"


def merge_configuration(run: PlannedRun) -> dict[str, Any]:
    """Merge the run's configuration files and settings, without the defaults of classes."""
    layers = [mapping(read_config(path)) for path in run.arm.configs]
    for key, value in run.settings.items():
        nested = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        layers.append(nested)
    return reduce(_merge_layer, layers, {})


def _merge_layer(config: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Merge a file or a setting into the configuration, with callbacks as `anlit fit` has them.

    `callbacks+` adds to the list. An option such as `callbacks.schedule` changes the last callback.
    """
    callbacks = as_list(mapping(config.get("trainer")).get("callbacks"))
    trainer = dict(mapping(layer.get("trainer")))
    if "callbacks+" in trainer:
        trainer["callbacks"] = [*callbacks, *as_list(trainer.pop("callbacks+"))]
    changes = trainer.get("callbacks")
    if callbacks and isinstance(changes, dict) and "class_path" not in changes:
        last = callbacks[-1]
        if isinstance(last, str):
            last = {"class_path": last}
        arguments = init_args(last) | changes.get("init_args", changes)
        trainer["callbacks"] = [*callbacks[:-1], last | {"init_args": arguments}]
    return merge(config, layer | {"trainer": trainer})

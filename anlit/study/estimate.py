"""How many tokens and hours the runs of a study need, estimated from its YAML before anything starts."""

from collections import Counter
from functools import reduce
from typing import Any, NamedTuple

from anlit.config.labels import init_args, mapping, n_devices
from anlit.study.plan import Setting, Study, Trial, merged, read_config

DEFAULTS = {"vocab_size": 50_304, "context_length": 2048, "n_layers": 12, "d_model": 768}
"""Defaults of the three architectures. The vocabulary is GPT-2's."""
SECONDS_TO_START = 10.0
"""The time for imports, opening the data and the first step."""


class Cost(NamedTuple):
    """The cost of one run. FLOPs are 6 per weight and token, and 12·d per layer and visible key."""

    tokens: float
    parameters: float
    flops: float


def cost_of(run: Trial) -> Cost:
    """The cost of a run by its configuration. Each sequence counts as one document, which gives an upper bound."""
    config = configuration_of(run)
    model, data, trainer = (
        init_args(config.get("model")),
        init_args(config.get("data")),
        mapping(config.get("trainer")),
    )
    sizes = DEFAULTS | {
        key: value for key, value in (*data.items(), *model.items()) if value is not None
    }
    d, layers, vocabulary, length = (
        sizes[key] for key in ("d_model", "n_layers", "vocab_size", "context_length")
    )
    linear = layers * (4 * d * d + 3 * d * (sizes.get("d_ff") or 4 * d)) + vocabulary * d
    ranks = n_devices(trainer.get("devices", 1)) * trainer.get("num_nodes", 1)
    per_step = (
        data.get("batch_size", 8) * length * trainer.get("accumulate_grad_batches", 1) * ranks
    )
    tokens = float(per_step * trainer.get("max_steps", 1000))
    return Cost(
        tokens, linear + vocabulary * d, tokens * (6.0 * linear + 6.0 * layers * d * (length + 1))
    )


def overview(study: Study, jobs: int, selected: dict[str, Setting], ended: dict[str, str]) -> str:
    """What `--dry_run` prints: the runs of both phases by arm, tokens and estimated hours of those that are left.

    `ended` maps names of the others to the reason; `selected` has the setting to measure of arms that are tuned.
    """
    pace = mapping(study.content.get("pace"))
    rate, lines, total = (
        float(pace.get("flops_per_second") or 0),
        [f"{study.title} ({study.label})"],
        0.0,
    )
    for arm in study.arms:
        tuned = f"{len(arm.points)} settings × {len(study.tuning_seeds)} tuning seeds"
        seeds = f"{len(study.seeds)} seeds"
        lines.append(
            f"  {arm.name}: "
            + (f"{tuned}, the best on {seeds}" if arm.is_tuned else f"{seeds}, no tuning")
        )
    measured = study.measured_runs({arm.name: arm.points[0] for arm in study.arms} | selected)
    for phase, runs in (("tuning", study.tuning_runs()), ("measuring", measured)):
        costs = [cost_of(run) for run in runs if run.name not in ended]
        counts = Counter(ended[run.name] for run in runs if run.name in ended)
        hours = (
            sum(cost.flops / rate + SECONDS_TO_START for cost in costs) / 3600 / jobs
            if rate
            else 0.0
        )
        words = f", about {hours:.2f} h" if hours else ""
        words += (
            f" (of {len(runs)}: {', '.join(f'{n} {why}' for why, n in counts.items())})"
            if counts
            else ""
        )
        lines.append(
            f"{phase}: {len(costs)} runs, {sum(cost.tokens for cost in costs):,.0f} tokens{words}"
        )
        total += hours
    estimate = "none, because the study's YAML has no `pace: {flops_per_second: …}` for this budget"
    if rate:
        estimate = f"{total:.2f} h with --jobs {jobs}, each run at {rate:.3g} FLOP/s ({pace.get('measured') or ''})"
    return "\n".join([*lines, f"estimate: {estimate}"])


def configuration_of(run: Trial) -> dict[str, Any]:
    """The run's configuration files and settings merged, without the defaults of the classes that they name."""
    parts = [mapping(read_config(path)) for path in run.arm.configs]
    for key, value in run.settings.items():
        parts.append(reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value))
    return reduce(merged, parts, {})

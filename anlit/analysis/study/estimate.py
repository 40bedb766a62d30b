"""How many tokens and hours the runs of a study need, estimated from its YAML before anything starts."""

from dataclasses import dataclass
from typing import Any

from anlit.analysis.study.plan import Study, Trial, merged, read_config
from anlit.configuration import mapping

DEFAULTS = {"vocab_size": 50_304, "context_length": 2048, "n_layers": 12, "d_model": 768}
"""Defaults of the three architectures. The vocabulary is GPT-2's."""
SECONDS_TO_START = 10.0
"""The time for imports, opening the data and the first step."""


@dataclass(frozen=True)
class Cost:
    """The cost of one run. FLOPs are 6 per weight and token, and 12·d per layer and visible key."""

    tokens: float
    parameters: float
    flops: float


def cost_of(run: Trial) -> Cost:
    """The cost of a run by its configuration. Each sequence counts as one document, which gives an upper bound."""
    config = configuration_of(run)
    model, data, trainer = (mapping(config.get(name)) for name in ("model", "data", "trainer"))
    vocabulary_of_data = {"vocab_size": mapping(data.get("init_args")).get("vocab_size", DEFAULTS["vocab_size"])}
    sizes = (
        DEFAULTS
        | vocabulary_of_data
        | {key: value for key, value in mapping(model.get("init_args")).items() if value is not None}
    )
    d, layers, vocabulary, length = (sizes[key] for key in ("d_model", "n_layers", "vocab_size", "context_length"))
    linear = layers * (4 * d * d + 3 * d * (sizes.get("d_ff") or 4 * d)) + vocabulary * d
    per_step = mapping(data.get("init_args")).get("batch_size", 8) * length * trainer.get("accumulate_grad_batches", 1)
    devices = trainer.get("devices", 1)
    ranks = (devices if isinstance(devices, int) else 1) * trainer.get("num_nodes", 1)
    tokens = float(per_step * ranks * trainer.get("max_steps", 1000))
    return Cost(tokens, linear + vocabulary * d, tokens * (6.0 * linear + 6.0 * layers * d * (length + 1)))


def hours(cost: Cost, flops_per_second: float) -> float:
    """Hours of one run at a rate in FLOP/s."""
    return (cost.flops / flops_per_second + SECONDS_TO_START) / 3600


def pace_of(study: Study) -> tuple[float | None, str]:
    """The rate of one run in FLOP/s that the study's YAML gives, and where it was measured."""
    pace = mapping(study.content.get("pace"))
    rate = pace.get("flops_per_second")
    return (float(rate) if rate is not None else None), str(pace.get("measured") or "")


def overview(study: Study, jobs: int) -> str:
    """What `--dry_run` prints: the runs of both phases by arm, their tokens and estimated hours."""
    rate, where = pace_of(study)
    lines, total = [f"{study.title} ({study.label})"], 0.0
    for arm in study.arms:
        tuned = f"{len(arm.points)} settings × {len(study.tuning_seeds)} tuning seeds, the best on "
        lines.append(f"  {arm.name}: {tuned if arm.is_tuned else ''}{len(study.seeds)} seeds"
                     + (", no tuning" if not arm.is_tuned else ""))  # fmt: skip
    measured = study.measured_runs({arm.name: arm.points[0] for arm in study.arms})
    for phase, runs in (("tuning", study.tuning_runs()), ("measuring", measured)):
        costs = [cost_of(run) for run in runs]
        line = f"{phase}: {len(runs)} runs, {sum(cost.tokens for cost in costs):,.0f} tokens"
        if rate is not None and runs:
            spent = sum(hours(cost, rate) for cost in costs) / jobs
            total += spent
            line += f", about {spent:.2f} h"
        lines.append(line)
    if rate is None:
        why = "the study's YAML has no `pace: {flops_per_second: …}` for this budget"
        return "\n".join([*lines, f"estimate: none, because {why}"])
    return "\n".join([*lines, f"estimate: {total:.2f} h with --jobs {jobs}, each run at {rate:.3g} FLOP/s ({where})"])


def configuration_of(run: Trial) -> dict[str, Any]:
    """The run's configuration files and settings merged, without the defaults of the classes that they name."""
    config: dict[str, Any] = {}
    for path in run.arm.configs:
        config = merged(config, mapping(read_config(path)))
    for key, value in run.settings.items():
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        config = merged(config, nested)
    return config

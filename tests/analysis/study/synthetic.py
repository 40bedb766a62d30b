"""Run folders of a study, as training would leave them, with losses that a function decides."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from anlit.analysis.study.estimate import configuration_of, cost_of
from anlit.analysis.study.plan import Study, Trial
from anlit.analysis.study.results import select

POINTS = 10
Final = Callable[[Trial, dict[str, Any], float, float], float]
"""(run, its settings by short name, parameters N, tokens D) → final loss in nats per token; NaN for a failed run."""


def train(study: Study, output: Path, final: Final, slowness: dict[str, float] | None = None) -> None:
    """Write all runs of both phases; `slowness` gives an arm's seconds relative to 1 per 1,000 tokens."""
    for run in study.tuning_runs():
        write_run(output / run.name, run, final, (slowness or {}).get(run.arm.base, 1.0))
    for run in study.measured_runs(select(study, output)):
        write_run(output / run.name, run, final, (slowness or {}).get(run.arm.base, 1.0))


def write_run(folder: Path, run: Trial, final: Final, slowness: float = 1.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration_of(run)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    cost = cost_of(run)
    parameters = int(cost.parameters)
    values = {**run.arm.varied.shown, **run.point.shown, "seed": run.seed.shown.get("seed", 0)}
    loss = final(run, values, parameters, cost.tokens)
    record = {
        "status": "failed" if np.isnan(loss) else "finished", "parameters": parameters,
        "error": "UserError: the loss became NaN" if np.isnan(loss) else None,
        "command": f"anlit fit --run_dir={folder.name}", "versions": {"python": "3.11", "torch": "2.13"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "hardware": {"cpu": "test", "cores": 2, "devices": ["cpu"]},
        "data": {"corpus": "small", "content_sha256": "c0ffee", "tokenizer_sha256": "deed"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    if np.isnan(loss):
        return
    share = np.arange(1, POINTS + 1) / POINTS
    curve = loss + 2.0 * (share**-0.4 - 1)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "val/loss", "val/tokens", "val/seconds", "val/bits_per_byte"])
        for part, value in zip(share, curve, strict=True):
            tokens = float(part * cost.tokens)
            writer.writerow([int(tokens // 10), float(value), tokens, tokens / 1000 * slowness, float(value / 2)])

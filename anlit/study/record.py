"""The runs in a study's report.json, and run folders made of them.

So a study goes on where only its record is left.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from anlit.compare.comparison import STUDY
from anlit.config.labels import CONFIG
from anlit.errors import UserError
from anlit.io.read import read_json
from anlit.io.write import write_json, write_text
from anlit.io.yaml_text import dump_yaml
from anlit.runs.folders import METRICS, RECORD, Curve, Run

REPORT_SCHEMA = {
    "comparisons": [dict],
    "measured": dict,
    "shared": {"config": dict, "record": dict},
}
ADVICE = "give the folder of a study's report"
COLUMNS = "step,val/tokens,val/seconds,val/loss,val/bits_per_byte"
"""The head of a restored metrics.csv."""


def read_record(folder: Path) -> tuple[dict[str, Any], dict[str, Run]]:
    """Read report.json in `folder`: its content, and its runs by their former folders.

    Raises:
        UserError: It is missing, or not a study's report.
    """
    record = read_json(folder / STUDY, REPORT_SCHEMA, ADVICE)
    runs: dict[str, Run] = {}
    try:
        shared = record["shared"]
        for name, entry in (record.get("measured") or {}).items():
            runs[name] = Run(
                Path(name),
                _join(shared["config"], entry["config"]),
                _join(shared["record"], entry["record"]),
                _read_curve(entry["curve"]),
                entry["bits_per_byte"],
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cause = f"{folder / STUDY} is not a report of a study ({error})"
        raise UserError(f"{cause}: {ADVICE}") from error
    return record, runs


def _read_curve(entry: dict[str, Any]) -> Curve:
    tokens = np.array(entry["tokens"], dtype=np.float64)
    seconds = np.array(entry["seconds"], dtype=np.float64)
    loss = np.array(entry["loss"], dtype=np.float64)
    return Curve(tokens, seconds, loss)


def _join(shared: dict[str, Any], own_entries: dict[str, Any]) -> dict[str, Any]:
    """Join what `record_runs` separated. The two have no common keys except mappings."""
    joined = shared | own_entries
    for key, value in own_entries.items():
        if key in shared:
            joined[key] = _join(shared[key], value)
    return joined


def restore(run: Run, folder: Path, source: Path) -> None:
    """Make `folder` a run folder of a recorded run that has finished, without a checkpoint.

    run.json names the `source` by its path from the working directory.
    """
    limit = run.config.get("trainer", {}).get("max_steps", -1)
    n_steps = limit if limit > 0 else len(run.curve)
    curve = run.curve
    lines = [COLUMNS]
    for tokens, seconds, loss in zip(curve.tokens, curve.seconds, curve.loss, strict=True):
        step = round(tokens / curve.tokens[-1] * n_steps) - 1
        lines.append(f"{step},{tokens},{seconds},{loss},")
    # Only the bits per byte of the last point are recorded.
    lines[-1] += f"{run.bits_per_byte or ''}\n"
    folder.mkdir()
    write_text(folder / METRICS, "\n".join(lines))
    write_text(folder / CONFIG, dump_yaml(run.config))
    write_json(folder / RECORD, run.record | {"restored_from": os.path.relpath(source)})

"""The runs in a study's report.json, and run folders made of them: so a study goes on where only its record is left."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from anlit.compare.comparison import STUDY
from anlit.config.labels import CONFIG
from anlit.errors import UserError
from anlit.io.read import dump_yaml, read_json
from anlit.io.write import write_json, write_text
from anlit.runs.folders import METRICS, RECORD, Curve, Run

SCHEMA = {"comparisons": [dict], "measured": dict, "shared": {"config": dict, "record": dict}}
ADVICE = "give the folder of a study's report"


def read_record(folder: Path) -> tuple[dict[str, Any], dict[str, Run]]:
    """The content of report.json in `folder`, and its runs by the folders that they had; UserError if it is none."""
    record, runs = read_json(folder / STUDY, SCHEMA, ADVICE), {}
    try:
        for name, run in (record.get("measured") or {}).items():
            curve = Curve(
                *(
                    np.array(run["curve"][key], dtype=np.float64)
                    for key in ("tokens", "seconds", "loss")
                )
            )
            config, own = (
                _joined(record["shared"][part], run[part]) for part in ("config", "record")
            )
            runs[name] = Run(Path(name), config, own, curve, run["bits_per_byte"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / STUDY} is no report of a study ({error}): {ADVICE}") from error
    return record, runs


def _joined(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What `record_runs` put apart: the two have no entry in common but mappings."""
    return (
        shared
        | own
        | {key: _joined(shared[key], value) for key, value in own.items() if key in shared}
    )


def restore(run: Run, folder: Path, source: Path) -> None:
    """Make `folder` a run folder of a recorded run, without a checkpoint; its run.json names the `source` by its path
    from the working directory.
    """
    lines = ["step,val/tokens,val/seconds,val/loss,val/bits_per_byte"]
    limit = run.config.get("trainer", {}).get("max_steps", -1)
    n_steps = limit if limit > 0 else len(run.curve)  # only finished runs are restored
    for tokens, seconds, loss in zip(
        run.curve.tokens, run.curve.seconds, run.curve.loss, strict=True
    ):
        lines += [
            f"{round(tokens / run.curve.tokens[-1] * n_steps) - 1},{tokens},{seconds},{loss},"
        ]
    folder.mkdir()
    write_text(
        folder / METRICS, "\n".join(lines) + f"{run.bits_per_byte or ''}\n"
    )  # which is that of the last point
    write_text(folder / CONFIG, dump_yaml(run.config))
    write_json(folder / RECORD, run.record | {"restored_from": os.path.relpath(source)})

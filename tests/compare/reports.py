"""A comparison's files, and timings beside it, for tests."""

import json
from pathlib import Path

from anlit.compare.compare import compare
from anlit.compare.comparison import STEPS
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs
from tests.compare.conftest import HARDWARE

LR = "model.init_args.optimizer.init_args.lr"
FASTER = [(100, 4.0), (200, 3.2), (300, 2.8), (400, 2.6)]
SLOWER = [(100, 6.0), (400, 3.5)]
SECOND = [(100, 5.2), (200, 4.2), (300, 3.7), (400, 3.2)]
"""The second seed of conftest's FALLING."""
H200 = {"hardware": {"devices": ["H200"]}}


def compared(runs, output, **options):
    """The comparison of the runs in a folder, its JSON and its Markdown."""
    report = compare([str(runs)], str(output), **options)
    raw = json.loads((output / "convergence.json").read_text())
    return report, raw, (output / "report.md").read_text()


def table_row(markdown, label):
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def write_paired(folder, runs, seconds, **record):
    """paired_steps.json for some runs; `seconds` per token of each, by round."""
    folder.mkdir(parents=True, exist_ok=True)
    arms = []
    for run, times in zip(runs, seconds, strict=True):
        (group,) = group_runs([load_run(Path(run))])
        arms.append({"key": group.key, "seconds_per_token": times})
    content = {"hardware": HARDWARE, **record, "arms": arms}
    (folder / STEPS).write_text(json.dumps(content))

"""Runs whose machine was not steady are named, others are not."""

import csv

from anlit.analysis.notes import unstable_throughput
from anlit.runs.folders import load_run
from anlit.runs.groups import group_runs

ANGPT = "anlit.models.angpt.AnGPT"
POINTS = [(100.0 * n, 6.0 - 0.5 * n) for n in range(1, 9)]


def retime(folder, seconds_of):
    """Replace the validations' times; `seconds_of(tokens)`."""
    path = folder / "metrics.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["val/tokens"]:
            row["val/seconds"] = seconds_of(float(row["val/tokens"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def notes_of(*folders):
    return unstable_throughput(group_runs([load_run(folder) for folder in folders]))


def test_steady_runs_are_not_named(make_run):
    one, other = make_run("a", POINTS), make_run("b", POINTS, ANGPT, seconds_per_token=0.12)
    retime(one, lambda tokens: 5.0 + 0.1 * tokens)  # a compiler's time before the first validation is no drift
    assert notes_of(one, other) == []


def test_a_run_that_slows_down_is_named(make_run):
    folder = make_run("drifting", POINTS)
    retime(folder, lambda tokens: 0.1 * tokens + max(0.0, 0.05 * (tokens - 500)))
    (note,) = notes_of(folder)
    assert note.startswith("drifting: unstable throughput, 10 tokens/s in its first half and 7 in its second")


def test_a_growing_context_explains_a_drift(make_run):
    folder = make_run("growing", POINTS, settings={"data.init_args.context_schedule": {"steps": 10}})
    retime(folder, lambda tokens: 0.1 * tokens + max(0.0, 0.05 * (tokens - 500)))
    assert notes_of(folder) == []


def test_seeds_at_different_speeds_are_named(make_run):
    slow, quick = make_run("slow", POINTS, seconds_per_token=0.12), make_run("quick", POINTS, seed=2)
    (note,) = notes_of(slow, quick)
    assert "unstable throughput between seeds, 8 tokens/s in slow and 10 in quick" in note


def test_runs_without_times_are_not_named(make_run):
    folder = make_run("a", POINTS, seconds_per_token=float("nan"))
    assert notes_of(folder) == []

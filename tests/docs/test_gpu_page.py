"""The times on the page of GPU results are those of its records."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path("docs/results")
PAGE = (RESULTS / "gpu.md").read_text()
STEP_NAMES = {"GPT+": "GPT+ sdpa compiled", "nGPT": "nGPT sdpa compiled", "anGPT": "anGPT sdpa compiled",
              "litgpt": "litgpt compiled whole"}  # fmt: skip


def read_record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "gpu" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def rows_of(record: dict[str, Any], title: str = "") -> dict[str, dict[str, Any]]:
    """The timed rows of the group whose title begins so, by label."""
    (group,) = (group for group in record["groups"] if group["title"].startswith(title))
    return {row["label"]: row for row in group["rows"] if row["reason"] is None}


def median_ms(row: dict[str, Any], kind: str) -> float:
    return 1e3 * row["seconds"][kind]["median"]


def share_of_peak(row: dict[str, Any], record: dict[str, Any]) -> float:
    rate = row["flops"]["train"] / row["seconds"]["train"]["median"]
    return rate / record["peak_flops_per_second"]


@pytest.mark.parametrize("model", ["GPT+", "nGPT", "anGPT"])
def test_a_step_is_that_of_its_record(model: str) -> None:
    record = read_record("step")
    row = rows_of(record)[STEP_NAMES[model]]
    clocks = "{mhz:.0f}, {watts:.0f}".format(**row["clocks"])
    expected = (
        f"| {model} | {median_ms(row, 'train'):.1f} | {share_of_peak(row, record):.0%} | "
        f"{clocks} | {row['peak_bytes'] / 1e9:.1f} |"
    ).replace("%", " %")
    assert expected in PAGE.splitlines()


@pytest.mark.parametrize("model", STEP_NAMES)
def test_a_step_beside_peers_is_that_of_its_record(model: str) -> None:
    record = read_record("step-with-peers")
    row = rows_of(record)[STEP_NAMES[model]]
    expected = (
        f"| {model} | {median_ms(row, 'train'):.1f} | {share_of_peak(row, record):.0%} | "
        f"{row['building_seconds']:.0f} |"
    ).replace("%", " %")
    assert expected in PAGE.splitlines()


def test_attention_is_that_of_its_records() -> None:
    short, long = read_record("attention-4k"), read_record("attention-16k")
    columns = [
        rows_of(short, "D 64, T 4096, dense"),
        rows_of(long, "D 64, T 16384, dense"),
        rows_of(long, "D 128, T 16384, dense"),
        rows_of(long, "D 128, T 16384, documents"),
    ]
    assert len(columns[0]) == 7
    for label in columns[0]:
        times = [f"{median_ms(column[label], 'both'):.2f}" for column in columns]
        assert f"| {label} | {' | '.join(times)} |" in PAGE.splitlines()
    errors = [max(row["error"].values()) for column in columns for row in column.values()]
    assert max(errors) < 6.5e-3


def test_kernels_in_a_step_are_those_of_their_record() -> None:
    rows = rows_of(read_record("step-scale-invariant"))
    times = {
        "`flex`": rows["anGPT flex compiled"],
        "our `triton`": rows["anGPT triton compiled"],
        "scale-invariant on `triton`": rows["anGPT scale-invariant triton compiled"],
    }
    said = ", ".join(f"{name} {median_ms(row, 'train'):.1f} ms" for name, row in times.items())
    assert said in PAGE

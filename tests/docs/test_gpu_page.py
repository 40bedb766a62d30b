"""The times on the page of GPU results follow from its records."""

import json
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path("docs/results")
PAGE = (RESULTS / "gpu.md").read_text()
STEP_NAMES = {
    "GPT+": "GPT+ sdpa compiled",
    "nGPT": "nGPT sdpa compiled",
    "anGPT": "anGPT sdpa compiled",
    "litgpt": "litgpt compiled whole",
}


def read_record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "gpu" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def rows_of(record: dict[str, Any], title: str = "") -> dict[str, dict[str, Any]]:
    """Return the timed rows of the group with this beginning of its title, by label."""
    (group,) = (group for group in record["groups"] if group["title"].startswith(title))
    return {row["label"]: row for row in group["rows"] if row["reason"] is None}


def median_ms(row: dict[str, Any], kind: str) -> float:
    return 1e3 * row["seconds"][kind]["median"]


def share_of_peak(row: dict[str, Any], record: dict[str, Any]) -> float:
    rate = row["flops"]["train"] / row["seconds"]["train"]["median"]
    return rate / record["peak_flops_per_second"]


def percent(share: float) -> str:
    """`51 %`."""
    return f"{100 * share:.0f} %"


def step_cells(row: dict[str, Any], record: dict[str, Any]) -> str:
    """`182.3 | 51 %`."""
    share = percent(share_of_peak(row, record))
    return f"{median_ms(row, 'train'):.1f} | {share}"


@pytest.mark.parametrize("model", ["GPT+", "nGPT", "anGPT"])
def test_a_step_follows_from_its_record(model: str) -> None:
    record = read_record("step")
    row = rows_of(record)[STEP_NAMES[model]]
    clocks = "{mhz:.0f}, {watts:.0f}".format(**row["clocks"])
    gigabytes = f"{row['peak_bytes'] / 1e9:.1f}"

    expected = f"| {model} | {step_cells(row, record)} | {clocks} | {gigabytes} |"
    assert expected in PAGE.splitlines()


def test_the_clock_under_angpt_follows_from_its_record() -> None:
    rows = rows_of(read_record("step"))
    gpt = rows[STEP_NAMES["GPT+"]]
    angpt = rows[STEP_NAMES["anGPT"]]
    clock = angpt["clocks"]["mhz"] / gpt["clocks"]["mhz"]
    time = median_ms(angpt, "train") / median_ms(gpt, "train")
    less_time = percent(1 - time)
    higher_clock = percent(clock - 1)
    more_cycles = percent(time * clock - 1)

    page = " ".join(PAGE.split())
    readme = " ".join(Path("README.md").read_text().split())
    assert f"{less_time} less time than GPT+, at an {higher_clock} h" in page
    assert f"its step has {more_cycles} more cycles" in page
    assert f"anGPT's clock was {higher_clock} higher" in readme


@pytest.mark.parametrize("model", STEP_NAMES)
def test_a_step_beside_peers_follows_from_its_record(model: str) -> None:
    record = read_record("step-with-peers")
    row = rows_of(record)[STEP_NAMES[model]]

    expected = f"| {model} | {step_cells(row, record)} | {row['building_seconds']:.0f} |"
    assert expected in PAGE.splitlines()


def test_attention_follows_from_its_records() -> None:
    short = read_record("attention-4k")
    long = read_record("attention-16k")
    columns = [
        rows_of(short, "D 64, T 4096, dense"),
        rows_of(long, "D 64, T 16384, dense"),
        rows_of(long, "D 128, T 16384, dense"),
        rows_of(long, "D 128, T 16384, documents"),
    ]
    labels = columns[0].keys()
    assert len(labels) == 7
    for label in labels:
        times = [f"{median_ms(column[label], 'both'):.2f}" for column in columns]
        expected = f"| {label} | {' | '.join(times)} |"
        assert expected in PAGE.splitlines()
    for column in columns:
        for row in column.values():
            assert max(row["error"].values()) < 6.5e-3


def test_kernels_in_a_step_follow_from_their_record() -> None:
    rows = rows_of(read_record("step-scale-invariant"))
    times = {
        "`flex`": rows["anGPT flex compiled"],
        "our `triton`": rows["anGPT triton compiled"],
        "scale-invariant on `triton`": rows["anGPT scale-invariant triton compiled"],
    }

    sentence = ", ".join(f"{name} {median_ms(row, 'train'):.1f} ms" for name, row in times.items())
    assert sentence in " ".join(PAGE.split())

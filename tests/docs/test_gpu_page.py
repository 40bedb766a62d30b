"""The figures on the page of GPU results follow from its records."""

import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

RESULTS = Path("docs/results")
PAGE = (RESULTS / "gpu.md").read_text()
TEXT = " ".join(PAGE.split())
GPT = "GPT+"
LITGPT = "litgpt, compiled whole"
STEP_NAMES = {
    GPT: "GPT+ compiled",
    "nGPT": "nGPT compiled",
    LITGPT: "litgpt compiled whole",
}


def read_record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / "gpu" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def rows_of(record: dict[str, Any], title: str = "") -> dict[str, dict[str, Any]]:
    """Return the timed rows of the group with this beginning of its title, by label."""
    (group,) = (group for group in record["groups"] if group["title"].startswith(title))
    return {row["label"]: row for row in group["rows"] if row["reason"] is None}


def median_ms(row: dict[str, Any], kind: str = "train") -> float:
    return 1e3 * row["seconds"][kind]["median"]


def share_of_peak(row: dict[str, Any], peak: float) -> str:
    """`51 %`."""
    return percent(row["flops"]["train"] / row["seconds"]["train"]["median"] / peak)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def kernel_us(row: dict[str, Any], part_of_name: str) -> float:
    """Return the mean µs of the kernel in a row's profile.

    A line ends with mean and calls. A kernel of the compiler also has a line for its launches, with
    the gaps between them.
    """
    means = []
    for line in row["profile"].splitlines():
        if part_of_name in line:
            means.append(float(line.split()[-2].removesuffix("us")))
    return min(means)


@pytest.mark.parametrize("model", STEP_NAMES)
def test_a_step_follows_from_its_record(model: str) -> None:
    record = read_record("step")
    row = rows_of(record)[STEP_NAMES[model]]
    clocks = "{mhz:.0f}, {watts:.0f}".format(**row["clocks"])
    ratio = "{median:.3f} ({low:.3f} – {high:.3f})".format(**row["ratio"]["train"])
    cells = [
        model,
        f"{median_ms(row):.1f}",
        "1.000" if model == GPT else ratio,
        share_of_peak(row, record["peak_flops_per_second"]),
        clocks,
        f"{row['peak_bytes'] / 1e9:.1f}",
    ]

    assert f"| {' | '.join(cells)} |" in PAGE.splitlines()


def test_the_first_sentence_follows_from_the_record() -> None:
    rows = rows_of(read_record("step"))
    gpt = median_ms(rows["GPT+ compiled"])
    over_litgpt = gpt / median_ms(rows["litgpt compiled whole"])

    assert f"in {gpt:.1f} ms" in TEXT
    assert f"{over_litgpt:.2f} times litgpt's time" in TEXT


def test_shares_of_the_data_sheets_peak_follow_from_the_record() -> None:
    record = read_record("step")
    rows = rows_of(record)
    shares = []
    for model in ("GPT+", "nGPT"):
        share = share_of_peak(rows[f"{model} compiled"], record["data_sheet_flops_per_second"])
        shares.append(f"{share} ({model})")

    assert " and ".join(shares) in TEXT


def test_kernels_follow_from_the_profiles() -> None:
    now = rows_of(read_record("step"))["GPT+ compiled"]
    before = rows_of(read_record("step-one-batch"))["GPT+ compiled"]
    rotation = "triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_cat_mul_split"

    slow, fast = kernel_us(now, rotation), kernel_us(before, rotation)
    assert f"It took {slow:.0f} µs a layer, and {fast:.0f} µs in the first call" in TEXT
    assert f"The difference is {24 * (slow - fast) / 1e3:.1f} ms" in TEXT
    was, became = (kernel_us(row, "mul_silu_silu_backward") for row in (before, now))
    assert f"took {was:.0f} µs a layer in the first call and {became:.0f} µs" in TEXT
    sum_of_gradient = "nvjet_sm90_tss_256x128_64x4_1x2_h_badd_coopA_NTT"
    chunks = 8 * kernel_us(before, sum_of_gradient), 4 * kernel_us(now, sum_of_gradient)
    assert f"takes {chunks[1] / 1e3:.1f} ms in place of {chunks[0] / 1e3:.1f}" in TEXT


def test_kernels_of_the_same_work_follow_from_the_profiles() -> None:
    rows = rows_of(read_record("step"))
    shares = []
    for kernel in ("sdpa_sm90_flash_bprop", "64x4_1x2_h_bz_coopA_TNT", "64x3_1x2_h_bz_coopB_NNT"):
        gpt, litgpt = (kernel_us(rows[STEP_NAMES[model]], kernel) for model in (GPT, LITGPT))
        shares.append(gpt / litgpt - 1)

    assert f"took {100 * min(shares):.0f} to {percent(max(shares))} longer in GPT+'s trace" in TEXT


def test_withdrawn_times_follow_from_the_record_of_one_batch() -> None:
    rows = rows_of(read_record("step-one-batch"))
    gpt = rows["GPT+ compiled"]
    angpt = rows["anGPT compiled"]
    clock = angpt["clocks"]["mhz"] / gpt["clocks"]["mhz"]
    more_cycles = percent(median_ms(angpt) / median_ms(gpt) * clock - 1)

    assert "anGPT had {mhz:.0f} MHz and {watts:.0f} W".format(**angpt["clocks"]) in TEXT
    assert "GPT+ had {mhz:.0f} MHz and {watts:.0f} W".format(**gpt["clocks"]) in TEXT
    assert f"{median_ms(angpt):.1f} ms in the first call" in TEXT
    assert f"has {more_cycles} more cycles" in TEXT
    # Rounds 5 and 9 began with GPT+, after anGPT. In the others GPT+ came after litgpt.
    times = gpt["seconds"]["train"]["values"]
    after_angpt = [times[4], times[8]]
    after_litgpt = [time for number, time in enumerate(times) if number not in (0, 4, 8)]
    assert f"GPT+ took {1e3 * min(after_angpt):.0f} ms, and after litgpt's" in TEXT
    assert f"{1e3 * median(after_litgpt):.0f} ms. Now the order is random" in TEXT
    (failed,) = (row for row in read_record("step")["groups"][0]["rows"] if row["model"] == "anGPT")
    assert failed["losses"][2] is None


def test_packed_documents_follow_from_their_record() -> None:
    rows = rows_of(read_record("step-documents-one-batch"))

    gpt, ngpt = (median_ms(rows[f"{model} compiled"]) for model in ("GPT+", "nGPT"))
    assert f"GPT+ {gpt:.1f} ms and nGPT {ngpt:.1f} ms" in TEXT


def test_a_run_follows_from_its_record() -> None:
    (times,) = read_record("fit")["rounds"]

    step = f"{1e3 * times['fit']:.1f} ms, {times['ratio']:.3f} times its bare step"
    assert step in TEXT
    assert f"waited for data {100 * times['data_wait_share']:.2f} % of the time" in TEXT
    rows = read_rows("fit")
    late = rows[len(rows) // 2 :]
    tokens = median(float(row["train/tokens_per_second"]) for row in late)
    mfu = median(float(row["train/mfu"]) for row in late)
    sentence = (
        f"on {round(tokens, -3):,.0f} tokens a second, {percent(mfu)} of the data sheet's peak"
    )
    assert sentence in TEXT


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


def test_flex_beside_triton_follows_from_its_record() -> None:
    ratios = []
    for group in read_record("attention-beside-others")["groups"]:
        rows = {row["label"]: row for row in group["rows"]}
        flex = rows["scale-invariant, flex"]
        ratios.append(median_ms(flex, "both") / median_ms(rows["scale-invariant, triton"], "both"))
        assert max(flex["error"].values()) < 3.5e-3

    assert f"took {min(ratios):.1f} to {max(ratios):.1f} times as long as our `triton`" in TEXT


def test_tests_and_seconds_follow_from_the_calls() -> None:
    lines = (RESULTS / "gpu" / "calls.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    passed = {}
    for call in calls:
        if "tests" in call:
            passed[call["item"], call["call"]] = call["tests"].split()[0]
            assert "failed" not in call["tests"] or " 0 failed" in call["tests"]
    (tools,) = (call["log"] for call in calls if call["item"] == "tools")

    sentence = (
        "All that ended passed: {} tests of our kernels in bfloat16, {} in float16 and {} in "
        "float32 (then the time was over), {} of `flash` and FlexAttention, {} of models"
    )
    names = ["triton-bfloat16", "triton-float16", "triton-float32", "flash-flex", "models"]
    assert sentence.format(*(passed[f"tests-{name}", 1] for name in names)) in TEXT
    assert passed["tests-models", 1] == passed["tests-models", 2]
    seconds = [f"{float(line.split()[0]):.1f} s" for line in tools]
    assert "`validate` took {}, `generate` {} and `score` {},".format(*seconds) in TEXT


def test_losses_follow_from_the_runs() -> None:
    losses = [val_losses("gpt"), val_losses("ngpt")]
    for step in losses[0]:
        cells = [str(step), *(f"{by_step[step]:.3f}" for by_step in losses), ""]
        assert f"| {' | '.join(cells)}|" in PAGE.splitlines()
    assert val_losses("angpt") == {}
    on_gpu = read_rows("angpt")[0]
    on_cpu = read_rows("angpt-cpu")
    assert on_gpu["step"] == on_cpu[9]["step"] == "9"
    losses = [float(row["train/loss"]) for row in (on_cpu[9], on_gpu)]
    norms = [float(row["train/grad_norm"]) for row in (on_cpu[9], on_gpu)]
    assert "(loss {:.3f} for {:.3f}, gradient norm".format(*losses) in TEXT
    assert "gradient norm {:.2f} for {:.2f} at the tenth".format(*norms) in TEXT
    fourth = float(on_cpu[3]["train/grad_norm"])
    tenth_of_gpt = float(read_rows("gpt")[0]["train/grad_norm"])
    assert f"was {fourth:.1f} at the fourth step; GPT+'s was {tenth_of_gpt:.1f} at the" in TEXT


def test_the_rates_of_a_deep_angpt_follow_from_their_runs() -> None:
    full = read_rows("angpt-cpu-short")
    half = read_rows("angpt-cpu-short-half")
    losses = float(full[5]["train/loss"]), float(half[25]["train/loss"])
    largest_norm = max(float(row["train/grad_norm"]) for row in half)

    assert float(full[0]["train/learning_rate"]) == pytest.approx(1 / 384)
    assert float(half[0]["train/learning_rate"]) == pytest.approx(0.0013)
    expected = "a loss of {:.1f} at the sixth step. Half of it had {:.2f} at the 26th".format(
        *losses
    )
    assert expected in TEXT
    assert f"gradient norm was at most {largest_norm:.1f}" in TEXT


def val_losses(name: str) -> dict[int, float]:
    losses = {}
    for row in read_rows(name):
        if row.get("val/loss"):
            losses[int(row["step"]) + 1] = float(row["val/loss"])
    return losses


def read_rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / "gpu" / "learning" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))

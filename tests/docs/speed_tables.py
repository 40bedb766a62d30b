"""Rows of the tables of attention.md, nu_att.md and speed.md, computed from the records."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tests.docs.page_tables import ATTENTION, EMPTY, SPEED, UNRECORDED, Rows, table
from tests.docs.records import (
    RESULTS,
    Lengths,
    Study,
    arm_of_run,
    by_key,
    column,
    figure,
    listed,
    read_record,
    saving,
    summary,
)

MECHANISMS = {
    "plain, RoPE": "rope",
    "plain, p-RoPE": "p-rope",
    "plain, dynamic NTK": "ntk",
    "LogN, RoPE": "log-n",
    "√(2 log n), RoPE": "sqrt-log-n",
    "ALiBi": "alibi",
    "scale-invariant, p-RoPE": "scale-invariant",
}


@table(ATTENTION, "Mechanisms by length at 20 tokens per parameter")
def mechanisms_by_length() -> Rows:
    lengths = Lengths("attention/0.4m/lengths")
    savings: dict[str, list[str]] = defaultdict(list)
    for path in sorted((RESULTS / "attention/0.4m/diagnose").iterdir()):
        arm = path.name.partition("_seed-")[0]
        diagnosis = read_record(str(path.relative_to(RESULTS)))
        savings[arm].append(saving(diagnosis))
    rows = []
    for label, arm in MECHANISMS.items():
        rows.append([label, ", ".join(savings[arm]), *lengths.row(arm)])
    return rows


@table(ATTENTION, "Mechanisms by length at 20 tokens per parameter", 1)
def needles() -> Rows:
    record = read_record("attention/0.4m/needle/needle.json")
    accuracies: dict[tuple[str, int], list[float]] = defaultdict(list)
    for checkpoint, points in zip(record["checkpoints"], record["measurements"], strict=True):
        arm = arm_of_run(Path(checkpoint["file"]).parts[-3])
        for point in points:
            accuracies[arm, point["length"]].append(point["accuracy"])
    rows = []
    for label, arm in MECHANISMS.items():
        cells = [summary(accuracies[arm, length]) for length in record["settings"]["lengths"]]
        rows.append([label, *cells])
    return rows


@table(ATTENTION, "Mechanisms by length after short training")
def mechanisms_after_short_training() -> Rows:
    masked = Lengths("attention/short/masked")
    unmasked = Lengths("attention/short/unmasked")
    rows = []
    for label, arm in MECHANISMS.items():
        rows.append([label, *masked.row(arm), *unmasked.row(arm, masking=False)])
    return rows


@table(ATTENTION, "Changing a trained model's attention")
def changed_attention() -> Rows:
    lengths = Lengths("change_attention/lengths")
    arms = {
        "plain, RoPE (no change)": "plain",
        "plain, dynamic NTK": "ntk",
        "scale-invariant, at once": "scale-invariant-at-once",
        "scale-invariant, warm start over 10 steps": "scale-invariant",
        "LogN, warm start": "log-n",
        "√(2 log n), warm start": "sqrt-log-n",
    }
    rows = []
    for label, arm in arms.items():
        rows.append([label, *lengths.row(arm)])
    return rows


@table(ATTENTION, "Changing a trained model's attention", 1)
def needles_of_changed_attention() -> Rows:
    rows = []
    for arm in read_record("change_attention/needle/needle.json")["arms"]:
        label = arm["label"].removeprefix("GPT+, ")
        if label in ("plain, RoPE", "scale-invariant"):
            nats = column(arm["lengths"], "nats_per_token")
            rows.append([label, *map(figure, nats)])
    return rows


@table("nu_att.md", "Does anGPT's attention want its missing factor?")
def missing_factor() -> Rows:
    lengths = Lengths("attention/short/nu_att")
    arms = {
        "plain": "angpt_output_scaling=none",
        "plain, with ν_att": "angpt_output_scaling=gaussian",
        "scale-invariant": "angpt-scale-invariant_output_scaling=none",
        "scale-invariant, with ν_att": "angpt-scale-invariant_output_scaling=gaussian",
    }
    rows = []
    for label, arm in arms.items():
        rows.append([label, *lengths.absolute(arm)])
    return rows


def with_interval(values: Iterable[float]) -> str:
    """`0.92 (0.88 … 0.95)` of 0.92, 0.88 and 0.95."""
    return "{} ({} … {})".format(*map(figure, values))


def milliseconds(row: dict[str, Any]) -> str:
    return figure(1e3 * row["median"])


def quartiles(row: dict[str, Any]) -> str:
    """`651 (576 … 691)`, in milliseconds."""
    low, high = row["quartiles"]
    return f"{milliseconds(row)} ({figure(1e3 * low)} … {figure(1e3 * high)})"


def megabytes(row: dict[str, Any]) -> str:
    """Return the peak memory of a row."""
    return figure(row["peak_bytes"] / 1e6)


def times_by_kernel(shape: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Return median seconds of forward and backward by mechanism and kernel."""
    seconds = {}
    for row in shape["entrants"]:
        seconds[row["mechanism"], row["kernel"]] = row["both"]["median"]
    return seconds


@table(SPEED, "A training step")
def training_step() -> Rows:
    rows_by_label = by_key(read_record("step_cpu/xeon/step-cpu.json")["rows"], "label")
    labels = {
        "GPT+": "GPT",
        "nGPT": "nGPT",
        "anGPT": "anGPT",
        "litgpt's GPT (no QK-norm), best of its modes": "litgpt",
        "transformers' Qwen3, best of its modes": "transformers",
    }
    rows = []
    for label, model in labels.items():
        eager = rows_by_label[f"{model} eager"]
        modes = []
        for name, row in rows_by_label.items():
            if name.startswith(f"{model} compiled"):
                modes.append(row)
        compiled = min(modes, key=median_of_step)
        eager_time = quartiles(eager["spread"]["train"])
        compiled_time = quartiles(compiled["spread"]["train"])
        memory = f"{megabytes(eager)} / {megabytes(compiled)} MB"
        rows.append([label, eager_time, compiled_time, memory])
    return rows


def median_of_step(row: dict[str, Any]) -> float:
    return row["spread"]["train"]["median"]


@table(SPEED, "A training step", 1)
def step_ratios() -> Rows:
    """The ratios that the benchmark compared with its aims."""
    labels = {
        "time of anGPT ÷ GPT+": "time of anGPT beside GPT+",
        "time of nGPT ÷ GPT+": "time of nGPT beside GPT+",
        "speed of GPT+ ÷ litgpt": "GPT+'s speed beside litgpt's GPT",
        "speed of GPT+ ÷ Qwen3": "GPT+'s speed beside transformers' Qwen3",
    }
    rows = []
    for label, aim in labels.items():
        cells = []
        for folder in ("step_cpu/xeon", "step_cpu"):
            targets = read_record(f"{folder}/step-cpu.json")["targets"]
            targets_by_name = by_key(targets, "what")
            for mode in ("eager", "compiled"):
                measured = targets_by_name[f"{mode}: {aim}"]["measured"]
                cells.append(measured.replace(" ×", "").replace("–", "…"))
        bound = targets_by_name[f"eager: {aim}"]["wanted"].removesuffix(" ×")
        rows.append([label, bound, *cells])
    return rows


@table(SPEED, "A run beside its bare steps")
def runs_beside_bare_steps() -> Rows:
    rows = []
    for label, name in (("GPT+", "gpt"), ("nGPT", "ngpt"), ("anGPT", "angpt")):
        rounds = read_record(f"fit_cpu/{name}.json")["rounds"]
        ratios = column(rounds, "ratio")
        span = f"{min(ratios):.3f} … {max(ratios):.3f}"
        ratio = f"{statistics.median(ratios):.3f} ({span})"
        waits = statistics.median(column(rounds, "data_wait_share"))
        rows.append([label, ratio, f"{100 * waits:.2f} %"])
    return rows


@table(SPEED, "A training step", 2)
def step_in_bfloat16() -> Rows:
    rows = []
    for model in ("GPT+", "nGPT", "anGPT"):
        cells = []
        for dtype, mode in product(("float32", "bfloat16"), ("eager", "compiled")):
            label = f"{model} {mode}"
            cells.append(f"{step_time(dtype, 1, label)}, {step_time(dtype, 2, label)}")
        rows.append([model, *cells])
    return rows


def step_time(dtype: str, turn: int, label: str) -> str:
    """Return the median milliseconds of a step in a measurement."""
    group = read_record(f"step_cpu/bfloat16/{dtype}-{turn}.json")["groups"][0]
    row = by_key(group["rows"], "label")[label]
    return milliseconds(row["seconds"]["train"])


@table(SPEED, "Attention")
def attention_on_cpu() -> Rows:
    kernels = (("plain", "sdpa"), ("scale-invariant", "blockwise"), ("scale-invariant", "eager"))
    rows = []
    for length in (256, 1024, 4096):
        for threads in (1, 2):
            record = read_record(f"attention_cpu/threads_{threads}/attention.json")
            shapes = {}
            for shape in record["shapes"]:
                shapes[shape["shape"]["label"]] = times_by_kernel(shape)
            cells = []
            for layout, kernel in product(("dense", "documents"), kernels):
                seconds = shapes[f"D 64, T {length}, {layout}"][kernel]
                cells.append(figure(1e3 * seconds))
            rows.append([f"{length:,}" if threads == 1 else EMPTY, str(threads), *cells])
    return rows


@table(SPEED, "Memory of the loss")
def memory_of_the_loss() -> Rows:
    by_way = by_key(read_record("loss_memory/loss.json")["rows"], "way")
    anlit = by_way["anlit"]
    full = by_way["full"]
    torch = by_way["torch"]
    share = figure(100 * anlit["part_of_full"])
    memory = f"{megabytes(anlit)}, {share} % of full logits, aim 25 %"
    return [
        ["anlit", memory, figure(anlit["seconds"])],
        ["full logits", megabytes(full), figure(full["seconds"])],
        ["torch's own chunked loss", megabytes(torch), figure(torch["seconds"])],
    ]


@table(SPEED, "Data")
def preparation() -> Rows:
    (prepare, _) = read_record("data_cpu/data.json")["groups"]
    labels = ("bare `encode_batch`", "one worker", "two workers together")
    rows = []
    for label, row in zip(labels, prepare["rows"], strict=True):
        seconds = row["seconds"]["token"]
        first_quartile, third_quartile = seconds["quartiles"]
        speeds = 1e-6 / np.array([seconds["median"], third_quartile, first_quartile])
        costs = row["beside"]["processor"]
        inverse = 1 / np.array([costs["median"], costs["high"], costs["low"]])
        cost = "1" if row is prepare["rows"][0] else with_interval(inverse)
        rows.append([label, with_interval(speeds), cost])
    return rows


@table(SPEED, "Data", 1)
def stream() -> Rows:
    (_, streams) = read_record("data_cpu/data.json")["groups"]
    rates = {}
    for row in streams["rows"]:
        rates[row["label"]] = figure(1e-6 / row["seconds"]["token"]["median"])
    rows = []
    for workers, label in enumerate(("0 workers", "1 worker", "2 workers")):
        rate = rates[f"anlit, workers: {workers}"]
        rate_of_litdata = rates[f"litdata, raw blocks, workers: {workers}"]
        rows.append([label, rate, rate_of_litdata])
    return rows


@table(SPEED, "Shared keys")
def shared_keys() -> Rows:
    """Columns: a key head for each query head, a shared key head, their ratio."""
    full, shared = read_record("shared_keys_cpu/step-cpu.json")["groups"][0]["rows"]
    flops = figure(shared["flops"]["train"] / full["flops"]["train"])
    step = [
        "training step, T 256, batch 4",
        f"{milliseconds(full['seconds']['train'])} ms",
        f"{milliseconds(shared['seconds']['train'])} ms",
        f"{ratio_of(shared, 'train')}; of the FLOPs {flops}",
    ]
    full, shared = read_record("shared_keys_cpu/decoding.json")["groups"][0]["rows"]
    cache = [
        "keys and values of 4 rows of 1,056 tokens",
        f"{figure(full['cache_bytes'] / 1e6)} MB",
        f"{figure(shared['cache_bytes'] / 1e6)} MB",
        figure(shared["cache_bytes"] / full["cache_bytes"]),
    ]
    decoding = [
        "`generate`, a step for 4 rows after 1,024 tokens",
        f"{milliseconds(full['seconds']['step'])} ms",
        f"{milliseconds(shared['seconds']['step'])} ms",
        ratio_of(shared, "step"),
    ]
    rate = figure(4 / full["seconds"]["step"]["median"])
    shared_rate = figure(4 / shared["seconds"]["step"]["median"])
    return [step, cache, decoding, ["`generate`, tokens/s", rate, shared_rate, EMPTY]]


def ratio_of(row: dict[str, Any], kind: str) -> str:
    """`0.92 (0.88 … 0.95)`: the row's time over the first row's."""
    ratio = row["beside"][kind]
    return with_interval([ratio["median"], ratio["low"], ratio["high"]])


@table(SPEED, "Hidden states in float32")
def hidden_states() -> Rows:
    points = by_key(read_record("bfloat16_h/report.json")["points"], "arm")
    study = Study("bridge")
    rows = []
    for arm, key in (("anGPT", "angpt"), ("nGPT", "ngpt")):
        losses = study.losses(arm, (1, 2, 3))
        float32 = np.array(list(losses.values()))
        bfloat16 = np.array(points[key]["losses"])
        gaps = bfloat16 - float32
        rows.append([arm, listed(float32), listed(bfloat16), listed(gaps)])
    return rows


@table(SPEED, "Wall-clock on a busy machine")
def busy_machine() -> Rows:
    """The first row and these runs' speed-ups in tokens have no record.

    `test_wall_clock_on_a_busy_machine` compares the ratios of the rows to each other.
    """
    files = ("load-9-spinning", "load-11-spinning", "load-9-asleep")
    rows = [["below 1", "spinning", "15", *[UNRECORDED] * 3]]
    for file in files:
        load, threads = file.removeprefix("load-").split("-")
        rounds = len(read_record(f"busy_cpu/{file}.json")["arms"][0]["seconds_per_token"])
        stop = "as many as 2 % take" if threads == "asleep" else str(rounds)
        rows.append([load, threads, stop, *[UNRECORDED] * 3])
    return rows

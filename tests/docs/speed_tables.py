"""The rows of the tables of attention.md, nu_att.md and speed.md, as the records beside them give them."""

from pathlib import Path
from typing import Any

from tests.docs.page_tables import ATTENTION, EMPTY, SPEED, UNRECORDED, Rows, table
from tests.docs.records import (
    RESULTS,
    Lengths,
    Study,
    arm_of_run,
    figure,
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
    savings: dict[str, list[str]] = {}
    for path in sorted((RESULTS / "attention/0.4m/diagnose").iterdir()):
        diagnosis = read_record(str(path.relative_to(RESULTS)))
        savings.setdefault(path.name.partition("_seed-")[0], []).append(saving(diagnosis))
    rows = []
    for label, arm in MECHANISMS.items():
        rows.append([label, ", ".join(savings[arm]), *lengths.row(arm)])
    return rows


@table(ATTENTION, "Mechanisms by length at 20 tokens per parameter", 1)
def needles() -> Rows:
    record = read_record("attention/0.4m/needle/needle.json")
    accuracies: dict[str, dict[int, list[float]]] = {}
    for checkpoint, points in zip(record["checkpoints"], record["measurements"], strict=True):
        by_length = accuracies.setdefault(arm_of_run(Path(checkpoint["file"]).parts[-3]), {})
        for point in points:
            by_length.setdefault(point["length"], []).append(point["accuracy"])
    return [
        [label, *(summary(values) for values in accuracies[arm].values())]
        for label, arm in MECHANISMS.items()
    ]


@table(ATTENTION, "Mechanisms by length after short training")
def mechanisms_after_short_training() -> Rows:
    masked, unmasked = (Lengths(f"attention/short/{name}") for name in ("masked", "unmasked"))
    return [
        [label, *masked.row(arm), *unmasked.row(arm, masking=False)]
        for label, arm in MECHANISMS.items()
    ]


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
    return [[label, *lengths.row(arm)] for label, arm in arms.items()]


@table("nu_att.md", "Does anGPT's attention want its missing factor?")
def missing_factor() -> Rows:
    lengths = Lengths("attention/short/nu_att")
    arms = {
        "plain": "angpt_output_scaling=none",
        "plain, with ν_att": "angpt_output_scaling=gaussian",
        "scale-invariant": "angpt-scale-invariant_output_scaling=none",
        "scale-invariant, with ν_att": "angpt-scale-invariant_output_scaling=gaussian",
    }
    return [[label, *lengths.absolute(arm)] for label, arm in arms.items()]


def milliseconds(row: dict[str, Any]) -> str:
    return figure(1e3 * row["median"])


def quartiles(row: dict[str, Any]) -> str:
    """`651 (576 – 691)`, in milliseconds."""
    low, high = (figure(1e3 * value) for value in row["quartiles"])
    return f"{milliseconds(row)} ({low} … {high})"


@table(SPEED, "A training step")
def training_step() -> Rows:
    measured = read_record("step_cpu/xeon/step-cpu.json")["rows"]
    rows_by_label = {row["label"]: row for row in measured}
    labels = {
        "GPT+": "GPT",
        "nGPT": "nGPT",
        "anGPT": "anGPT",
        "litgpt's GPT (no QK-norm), best of its modes": "litgpt",
        "transformers' Qwen3, best of its modes": "transformers",
    }
    rows = []
    for label, model in labels.items():
        modes = [row for name, row in rows_by_label.items() if name.startswith(f"{model} compiled")]
        eager = rows_by_label[f"{model} eager"]
        compiled = min(modes, key=lambda row: row["spread"]["train"]["median"])
        times = [quartiles(row["spread"]["train"]) for row in (eager, compiled)]
        memory = " / ".join(figure(row["peak_bytes"] / 1e6) for row in (eager, compiled))
        rows.append([label, *times, f"{memory} MB"])
    return rows


@table(SPEED, "A training step", 1)
def step_ratios() -> Rows:
    """As the benchmark compared them with its aims."""
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
            by_aim = {target["what"]: target for target in targets}
            for mode in ("eager", "compiled"):
                measured = by_aim[f"{mode}: {aim}"]["measured"]
                cells.append(measured.replace(" ×", "").replace("–", "…"))
        wanted = by_aim[f"eager: {aim}"]["wanted"].removesuffix(" ×")
        rows.append([label, wanted, *cells])
    return rows


@table(SPEED, "A training step", 2)
def step_in_bfloat16() -> Rows:
    columns = [(dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("eager", "compiled")]
    rows = []
    for model in ("GPT+", "nGPT", "anGPT"):
        cells = []
        for dtype, mode in columns:
            turns = []
            for turn in (1, 2):
                groups = read_record(f"step_cpu/bfloat16/{dtype}-{turn}.json")["groups"]
                by_label = {row["label"]: row for row in groups[0]["rows"]}
                turns.append(milliseconds(by_label[f"{model} {mode}"]["seconds"]["train"]))
            cells.append(", ".join(turns))
        rows.append([model, *cells])
    return rows


@table(SPEED, "Attention")
def attention_on_cpu() -> Rows:
    kernels = (("plain", "sdpa"), ("scale-invariant", "blockwise"), ("scale-invariant", "eager"))
    rows = []
    for length in (256, 1024, 4096):
        for threads in (1, 2):
            record = read_record(f"attention_cpu/threads_{threads}/attention.json")
            shapes = {shape["shape"]["label"]: shape for shape in record["shapes"]}
            cells = []
            for layout in ("dense", "documents"):
                entrants = shapes[f"D 64, T {length}, {layout}"]["entrants"]
                times = {(row["mechanism"], row["kernel"]): row for row in entrants}
                cells += [milliseconds(times[kernel]["both"]) for kernel in kernels]
            rows.append([f"{length:,}" if threads == 1 else EMPTY, str(threads), *cells])
    return rows


@table(SPEED, "Data")
def preparation() -> Rows:
    (prepare, _) = read_record("data_cpu/data.json")["groups"]
    labels = ("bare `encode_batch`", "one worker", "two workers together")
    rows = []
    for label, row in zip(labels, prepare["rows"], strict=True):
        seconds = row["seconds"]["token"]
        rates = [1e-6 / seconds["median"], *(1e-6 / value for value in seconds["quartiles"][::-1])]
        speed = "{} ({} … {})".format(*map(figure, rates))
        costs = row["beside"]["processor"]
        inverse = [1 / costs[name] for name in ("median", "high", "low")]
        cost = "{} ({} … {})".format(*map(figure, inverse))
        rows.append([label, speed, "1" if row is prepare["rows"][0] else cost])
    return rows


@table(SPEED, "Data", 1)
def stream() -> Rows:
    (_, streams) = read_record("data_cpu/data.json")["groups"]
    rates = {}
    for row in streams["rows"]:
        rates[row["label"]] = figure(1e-6 / row["seconds"]["token"]["median"])
    rows = []
    for workers, label in enumerate(("0 workers", "1 worker", "2 workers")):
        names = (f"anlit, workers: {workers}", f"litdata, raw blocks, workers: {workers}")
        rows.append([label, *(rates[name] for name in names)])
    return rows


@table(SPEED, "Shared keys")
def shared_keys() -> Rows:
    step, decoding = (
        read_record(f"shared_keys_cpu/{name}.json")["groups"][0]["rows"]
        for name in ("step-cpu", "decoding")
    )
    flops = step[1]["flops"]["train"] / step[0]["flops"]["train"]
    cache = [row["cache_bytes"] for row in decoding]
    seconds = [row["seconds"]["step"]["median"] for row in decoding]
    steps = [f"{milliseconds(row['seconds']['train'])} ms" for row in step]
    return [
        ["training step, T 256, batch 4", *steps,
         f"{beside(step[1], 'train')}; of the FLOPs {figure(flops)}"],
        ["keys and values of 4 rows of 1,056 tokens", *(f"{figure(size / 1e6)} MB" for size in cache),
         figure(cache[1] / cache[0])],
        ["`generate`, a step for 4 rows after 1,024 tokens", *(f"{figure(1e3 * s)} ms" for s in seconds),
         beside(decoding[1], "step")],
        ["`generate`, tokens/s", *(figure(4 / s) for s in seconds), EMPTY],
    ]  # fmt: skip


def beside(row: dict[str, Any], kind: str) -> str:
    """`0.92 (0.88 … 0.95)`."""
    median, low, high = (figure(row["beside"][kind][name]) for name in ("median", "low", "high"))
    return f"{median} ({low} … {high})"


@table(SPEED, "Hidden states in float32")
def hidden_states() -> Rows:
    points = {point["arm"]: point for point in read_record("bfloat16_h/report.json")["points"]}
    study = Study("bridge")
    rows = []
    for arm, key in (("anGPT", "angpt"), ("nGPT", "ngpt")):
        single = list(study.losses(arm, (1, 2, 3)).values())
        half = points[key]["losses"]
        gaps = [b - a for a, b in zip(single, half, strict=True)]
        columns = (single, half, gaps)
        cells = [", ".join(map(figure, column)) for column in columns]
        rows.append([arm, *cells])
    return rows


@table(SPEED, "Wall-clock on a busy machine")
def busy_machine() -> Rows:
    """The speed-ups in tokens of these four runs have no record, nor has the first row.

    So only the ratios of the rows to each other are compared, in `test_wall_clock_on_a_busy_machine`.
    """
    files = ("load-9-spinning", "load-11-spinning", "load-9-asleep")
    rows = [["below 1", "spinning", "15", *[UNRECORDED] * 3]]
    for file in files:
        load, threads = file.removeprefix("load-").split("-")
        rounds = len(read_record(f"busy_cpu/{file}.json")["arms"][0]["seconds_per_token"])
        stop = "as many as 2 % take" if threads == "asleep" else str(rounds)
        rows.append([load, threads, stop, *[UNRECORDED] * 3])
    return rows

"""The rows of each table on the pages of results, as the records beside them give them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np

from anlit.analysis.statistics import median_with_interval
from tests.docs.records import RESULTS, Lengths, Study, arm_of_run, figure, read_record, summary

Rows = list[list[Any]]
Key = tuple[str, str, int]
"""Page, heading, and the table's number below the heading."""
TABLES: dict[Key, Callable[[], Rows]] = {}
EMPTY = ""
UNRECORDED = ANY
"""A cell without a record; the table's function says why."""


def table(page: str, heading: str, number: int = 0) -> Callable[[Callable[[], Rows]], Any]:
    """Register what the table has to hold."""

    def register(rows: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[page, heading, number] = rows
        return rows

    return register


ARCHITECTURES = "architectures.md"
ATTENTION = "attention.md"
SPEED = "speed.md"


@table(ARCHITECTURES, "Depth")
def depth() -> Rows:
    study = Study("depth")
    rows = []
    for layers in (2, 4, 8):
        gpt, angpt = (f"{name}, layers {layers}, width 64" for name in ("GPT+", "anGPT"))
        losses = study.losses(angpt), study.losses(gpt)
        by_seed = ", ".join(figure(losses[0][seed] - losses[1][seed]) for seed in losses[0])
        gap = f"{study.minus(angpt, gpt)}: {by_seed}"
        size = f"{figure(study.parameters[gpt] / 1e6)}M"
        rows.append([str(layers), size, study.mean(gpt), gap, study.faster(angpt, gpt)])
    return rows


@table(ARCHITECTURES, "Defaults", 1)
def against_tuned_settings() -> Rows:
    rows = []
    for size, tokens in (("0.1m", "20"), ("0.4m", "6"), ("1.3m", "0.6")):
        study = Study(f"defaults/{size}")
        cells = []
        for name in ("GPT+", "nGPT", "anGPT"):
            gap = study.minus(f"{name}, defaults", f"{name}, tuned")
            cells.append(gap if "(" in gap else f"{gap}, one seed")
        rows.append([f"{size[:-1]}M, {tokens}", *cells, "report"])
    return rows


@table(ARCHITECTURES, "A bridge from nGPT")
def bridge() -> Rows:
    study = Study("bridge")
    arms = {
        "with s_qk and SiLU of deviation 1": "anGPT, s_qk, SiLU of deviation 1",
        "with s_qk": "anGPT, s_qk",
        "with SiLU of deviation 1": "anGPT, SiLU of deviation 1",
        "nGPT": "nGPT",
        "GPT+": "GPT+",
    }
    rows = [["anGPT", "6", study.mean("anGPT"), "–", "–"]]
    for label, arm in arms.items():
        gap, onset = study.minus(arm, "anGPT"), study.onset_minus(arm, "anGPT", 3.3)
        seeds = str(len(study.curves[arm]))
        rows.append([label, seeds, study.mean(arm), gap, onset])
    return rows


TUNED = {
    "GPT+, rate 0.004, warm-up 40 %": ("gpt", "GPT+"),
    "anGPT, rate 0.0055, α's scale 0.3, warm-up 20 %": ("angpt", "anGPT"),
}


@table(ARCHITECTURES, "Equal tuning at 1.3M parameters")
def equal_tuning() -> Rows:
    """Seed 3 is in the record of the gain."""
    first, later = Study("compute_optimal/1.3m-tuned"), Study("bridge/plain-1.3m")
    rows = []
    for label, (key, arm) in TUNED.items():
        best = min(entry["loss"] for entry in first.record["tuning"][key])
        assert first.seeds(arm) == later.seeds(arm)[:2]
        rows.append([label, figure(best), *later.seeds(arm), later.mean(arm)])
    return rows


@table(ARCHITECTURES, "Equal tuning at 1.3M parameters", 1)
def settings_of_equal_tuning() -> Rows:
    tuning = read_record("compute_optimal/1.3m-tuned/report.json")["tuning"]
    columns = []
    for key in ("gpt", "angpt"):
        losses = sorted((entry["loss"], words(entry["setting"], key)) for entry in tuning[key])
        columns.append([(setting, figure(loss)) for loss, setting in losses])
    return [[*gpt, *angpt] for gpt, angpt in zip(*columns, strict=True)]


def words(setting: dict[str, float], arm: str) -> str:
    """`rate 0.004, warm-up 40 %`."""
    parts = [f"rate {setting['lr']:g}"]
    if arm == "angpt":
        scale = setting.get("alpha_scale")
        parts.append(f"α's scale {scale:g}" if scale else "α's scale 1/√d")
    if setting.get("warmup"):
        parts.append(f"warm-up {setting['warmup']:.0%}".replace("%", " %"))
    if setting.get("init_std"):
        parts.append(f"weights of {setting['init_std']:g}")
    return ", ".join(parts)


@table(ARCHITECTURES, "The gain on queries and keys")
def gain() -> Rows:
    study = Study("bridge/plain-1.3m")
    arms = {
        "GPT+": ("GPT+", "gpt"),
        "GPT+, no gain": ("GPT+, no gain on q and k", "gpt-bounded"),
        "anGPT": ("anGPT", "angpt"),
        "anGPT, gain": ("anGPT, gain on q and k", "angpt-gain"),
    }
    rows = []
    for label, (arm, file) in arms.items():
        diagnosis = read_record(f"bridge/plain-1.3m/attention/{file}.json")
        entropy = np.array(diagnosis["lengths"]["256"]["statistics"]["entropy"])
        of_layers = entropy[:, :, -1].mean(axis=1)  # over heads, at the longest contexts
        mean = study.mean(arm, seeds=(1, 2))
        sharpest = figure(of_layers.min())
        rows.append([label, *study.seeds(arm)[:2], mean, sharpest, saving(diagnosis)])
    return rows


def saving(diagnosis: dict[str, Any]) -> str:
    """What a copy of random tokens saves, in nats per token."""
    copying = diagnosis["copying"]
    return figure(copying["first"] - copying["second"])


@table(ARCHITECTURES, "The norm of attention's average")
def norm_of_average() -> Rows:
    study = Study("bridge/plain-1.3m")
    arms = {
        "GPT+": "GPT+",
        "GPT+, norm of the average": "GPT+, norm of each head's average",
        "anGPT": "anGPT",
        "anGPT, gain": "anGPT, gain on q and k",
        "anGPT, gain, norm of the average": "anGPT, gain, unit norm of each head's average",
    }
    rows = []
    for label, arm in arms.items():
        onsets = ", ".join(figure(onset) for onset in study.onsets(arm, 3.0).values())
        rows.append([label, *filled(study.seeds(arm), 3), study.mean(arm), onsets])
    return rows


def filled(cells: list[str], n: int) -> list[str]:
    return cells + [EMPTY] * (n - len(cells))


@table(ARCHITECTURES, "The norm of attention's average", 1)
def norm_of_average_of_a_small_model() -> Rows:
    """Which runs copy (bold) is not compared: of that the record has nothing."""
    study = Study("bridge/onset")
    arms = {
        "anGPT": "anGPT",
        "anGPT, unit norm of each head's average": "anGPT, unit norm of each head's average",
        "anGPT, unit norm of suggestions": "anGPT, unit norm of suggestions",
        "the same, and s_qk": "anGPT, unit norm of suggestions, s_qk",
        "GPT+": "GPT+",
        "GPT+, norm of each head's average": "GPT+, norm of each head's average",
        "nGPT": "nGPT",
        "nGPT, no s_qk": "nGPT, no s_qk",
        "nGPT, rows bounded": "nGPT, rows bounded",
    }
    rows = []
    for label, arm in arms.items():
        losses = study.seeds(arm)
        mean = study.mean(arm) if len(losses) > 1 else EMPTY
        mean += ", two groups" if arm == "GPT+" else EMPTY
        gap = study.minus(arm, "anGPT") if len(losses) > 1 and arm != "anGPT" else EMPTY
        rows.append([label, *filled(losses, 6), mean, gap])
    return rows


@table(ARCHITECTURES, "1.3M parameters")
def one_million() -> Rows:
    study = Study("compute_optimal/1.3m")
    arms = [
        "nGPT",
        "anGPT, half the rate",
        "anGPT",
        "anGPT, a quarter of the rate",
        "anGPT, half the rate, α's scale 0.3",
        "anGPT, half the rate, s_z's scale 1",
    ]
    rows = [["GPT+", "2", study.mean("GPT+"), "1"]]
    for arm in arms:
        seeds = str(len(study.curves[arm]))
        rows.append([arm, seeds, study.mean(arm), study.faster(arm, "GPT+")])
    return rows


@table(ARCHITECTURES, "Scale-invariant attention")
def scale_invariant_attention() -> Rows:
    study = Study("compute_optimal/0.4m-attention")
    rows = []
    for attention in ("", ", scale-invariant"):
        for name in ("GPT+", "nGPT", "anGPT"):
            arm, baseline = name + attention, "GPT+" + attention
            gap = EMPTY if arm == baseline else study.minus(arm, baseline)
            rows.append([arm, *study.seeds(arm), study.mean(arm), gap])
    return rows


@table(ARCHITECTURES, "0.4M parameters")
def small_model() -> Rows:
    study = Study("compute_optimal/0.4m")
    rows = [["GPT+", study.mean("GPT+"), EMPTY, EMPTY, "1"]]
    for arm in ("nGPT", "anGPT"):
        p = figure(study.p_holm(arm, "GPT+", ("nGPT", "anGPT")))
        gap = study.minus(arm, "GPT+")
        rows.append([arm, study.mean(arm), gap, p, study.faster(arm, "GPT+")])
    return rows


@table(ARCHITECTURES, "Settings by seed")
def settings_by_seed() -> Rows:
    study = Study("copying")
    compared = ("GPT+, rate 0.008, warm-up 20 %", "GPT+, rate 0.008, warm-up 40 %")
    rows = []
    for arm in study.curves:
        label = f"{arm}, chosen above" if arm == compared[0] else arm
        gap = study.minus("nGPT, s_z's scale 1", arm) if arm in compared else EMPTY
        rows.append([label, *study.seeds(arm), study.mean(arm), gap])
    return rows


@table(ARCHITECTURES, "The rotary fraction")
def rotary_fraction() -> Rows:
    """What a copy saves was logged by `trainer/dynamics.yaml`, which the record does not hold."""
    study = Study("copying/rotary")
    labels = {
        "GPT+, full": "GPT+, rate 0.008, warm-up 20 %",
        "nGPT, full": "nGPT, s_z's scale 1",
        "anGPT, full": "anGPT",
    }
    rows = []
    for arm, label in labels.items():
        gap = EMPTY if arm == "GPT+, full" else study.minus(arm, "GPT+, full")
        rows.append([label, *study.seeds(arm), study.mean(arm), gap, UNRECORDED])
    return rows


@table(ARCHITECTURES, "The same model on fewer tokens")
def fewer_tokens() -> Rows:
    rows = []
    for tokens in ("0.6", "2", "6", "20"):
        study = Study("compute_optimal/0.4m" + ("" if tokens == "20" else f"-{tokens}"))
        cells = [tokens, study.mean("GPT+")]
        for arm in ("nGPT", "anGPT"):
            cells += [study.minus(arm, "GPT+"), study.faster(arm, "GPT+")]
        rows.append(cells)
    return rows


@table(ARCHITECTURES, "0.1M parameters")
def tiny_model() -> Rows:
    study = Study("compute_optimal/0.1m")
    rows = []
    for attention in ("", ", scale-invariant"):
        baseline = "GPT+" + attention
        others = ["nGPT" + attention, "anGPT" + attention]
        rows.append([baseline, study.mean(baseline), EMPTY, EMPTY])
        for arm in others:
            p = figure(study.p_holm(arm, baseline, others))
            rows.append([arm, study.mean(arm), study.minus(arm, baseline), p])
    return rows


@table(ARCHITECTURES, "Convergence")
def convergence() -> Rows:
    study = Study("convergence/cpu")
    rows = []
    for qk_norm in ("", ", no QK-norm"):
        baseline = "GPT+" + qk_norm
        rows.append([baseline, study.mean(baseline), "1"])
        for arm in ("nGPT" + qk_norm, "anGPT" + qk_norm):
            rows.append([arm, study.mean(arm), study.faster(arm, baseline)])
    return rows


@table(ARCHITECTURES, "The demo")
def demo() -> Rows:
    study = Study("convergence/demo")
    seconds = {}
    for timed in read_record("convergence/demo/paired_steps.json")["arms"]:
        seconds[Path(timed["run"]).name.partition("_")[0]] = timed["seconds_per_token"]
    arms = {
        "nGPT": ("nGPT", "ngpt"),
        "anGPT": ("anGPT", "angpt"),
        "anGPT, scale-invariant attention": ("anGPT, scale-invariant", "angpt-scale-invariant"),
    }
    rows = [["GPT+", study.mean("GPT+"), "1", "1", "1"]]
    for label, (arm, key) in arms.items():
        ratios = [a / b for a, b in zip(seconds[key], seconds["gpt"], strict=True)]
        time = median_with_interval(ratios)
        tokens = study.speed_up(arm, "GPT+")
        rows.append([label, study.mean(arm), tokens.words, str(time), str(tokens.over(time))])
    return rows


@table(ARCHITECTURES, "Rate and batch size over size")
def rate_and_batch_size() -> Rows:
    tuning = read_record("hyperparameters-cpu/report.json")["tuning"]
    rows = []
    for width in (32, 64, 128):
        for batch in (2, 4, 8):
            cells = [str(width), str(batch)]
            for arm in ("gpt", "ngpt", "angpt"):
                losses = [
                    (entry["loss"], entry["setting"]["lr"])
                    for entry in tuning[f"{arm}_d_model={width}"]
                    if entry["setting"]["batch_size"] == batch
                ]
                loss, rate = min(losses)
                cells.append(f"{figure(loss)}, {rate:g}")
            rows.append(cells)
    return rows


@table(ARCHITECTURES, "From GPT+ to anGPT")
def ablation() -> Rows:
    """The last column is the paper's."""
    study = Study("ablation-cpu")
    baseline = "GPT+, no QK-norm"
    arms = {
        "GPT+ with QK-norm": ("GPT+", "−2.1 %"),
        "nGPT (strict norms)": ("nGPT (strict norms)", "−3.0 %"),
        "nGPT, norms bounded": ("nGPT, norms bounded", "−3.4 %"),
        "anGPT": ("anGPT", "−3.8 %"),
        "anGPT without ν(α)": ("anGPT without ν(α)", "unstable"),
        "anGPT without ν(α), twice the rate": ("anGPT without ν(α), twice the rate", "unstable"),
        "anGPT, all factors −2 %": ("anGPT, factors −2 %", "no change"),
        "anGPT, all factors 2 %": ("anGPT, factors +2 %", "no change"),
    }
    mean = np.mean(list(study.losses(baseline).values()))
    rows = []
    for label, (arm, theirs) in arms.items():
        test = study.test(arm, baseline)
        change, low, high = (
            figure(100 * value / mean) for value in (test.difference, test.low, test.high)
        )
        rows.append([label, f"{change} % ({low} … {high})", theirs])
    return rows


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

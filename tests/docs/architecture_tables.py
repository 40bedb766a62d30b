"""Rows of the tables of architectures.md, computed from the records beside it."""

import csv
import math
from operator import itemgetter
from typing import Any

import numpy as np

from anlit.compare.statistics import median_with_interval
from tests.docs.page_tables import ARCHITECTURES, EMPTY, UNRECORDED, Rows, table
from tests.docs.records import (
    RESULTS,
    Study,
    figure,
    listed,
    read_record,
    saving,
    seconds_per_token,
)


@table(ARCHITECTURES, "Depth")
def depth() -> Rows:
    study = Study("depth")
    rows = []
    for layers in (2, 4, 8):
        gpt = f"GPT+, layers {layers}, width 64"
        angpt = f"anGPT, layers {layers}, width 64"
        gpt_losses = study.losses(gpt)
        gaps = []
        for seed, loss in study.losses(angpt).items():
            gaps.append(loss - gpt_losses[seed])
        gap = f"{study.minus(angpt, gpt)}: {listed(gaps)}"
        size = f"{figure(study.parameters[gpt] / 1e6)}M"
        rows.append([str(layers), size, study.mean(gpt), gap, study.faster(angpt, gpt)])
    return rows


FIRST_STEPS = "angpt_depth/first_steps/longest_states.csv"
LONGEST = "longest norm after any block"


@table(ARCHITECTURES, "anGPT at depth")
def first_steps_of_angpt() -> Rows:
    rates = {
        "half-alpha": ("1/(2L)", "1/d"),
        "quarter-alpha": ("1/(4L)", "1/d"),
        "full-alpha": ("1/L", "1/d"),
        "small-rate": ("1/L", "1/(2d)"),
        "warm-up": ("1/L", "1/d after a warm-up of 16 steps"),
    }
    rows = []
    for arm, (alpha, rate) in rates.items():
        norms = []
        for values in first_steps(FIRST_STEPS, arm, LONGEST):
            norms.append(f"{max(values):.3g}".replace("e+", "e"))
        losses = []
        for values in first_steps(FIRST_STEPS, arm, "val/loss"):
            losses.append("NaN" if math.isnan(values[-1]) else f"{values[-1]:.3f}")
        rows.append([alpha, rate, ", ".join(norms), ", ".join(losses)])
    return rows


@table(ARCHITECTURES, "anGPT at depth", 1)
def angpt_at_depth() -> Rows:
    four = Study("angpt_depth/4")
    twelve = Study("angpt_depth/12")
    small_rate = ", ".join(twelve.seeds("α 1/L, smaller rate"))
    rows = []
    for layers, study in (("4", four), ("12", twelve)):
        for alpha in ("1/(2L)", "1/(4L)", "1/L"):
            rows.append([layers, alpha, "1/d", ", ".join(study.seeds(f"α {alpha}"))])
    return [*rows, ["12", "1/L", "6/(Ld)", small_rate]]


def first_steps(name: str, arm: str, column: str) -> list[list[float]]:
    """The values of a column of a table in CSV, for each seed of an arm."""
    values: dict[str, list[float]] = {}
    with (RESULTS / name).open() as file:
        for row in csv.DictReader(file):
            if row["arm"] == arm and row[column]:
                values.setdefault(row["seed"], []).append(float(row[column]))
    return list(values.values())


@table(ARCHITECTURES, "Clipping")
def clipping() -> Rows:
    study = Study("clipping")
    rows = []
    for model in ("GPT+", "nGPT", "anGPT"):
        unclipped = f"{model}, no clipping"
        losses = [", ".join(study.seeds(arm)) for arm in (model, unclipped)]
        rows.append([model, *losses, study.minus(model, unclipped)])
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


@table(ARCHITECTURES, "Defaults", 2)
def pairs_of_initial_weights_and_warm_up() -> Rows:
    """The record has the chosen pair's run only, and the page says so."""
    tried = ["0.05, 20 %", "0.03, 20 %", "0.05, 40 %", "0.02, 20 %", "0.03, 40 %"]
    chosen, _ = Study("defaults/0.4m").seeds("GPT+, defaults")
    rows = []
    for pair in tried:
        rows.append([pair, UNRECORDED])
    return [*rows, ["0.02, 40 %", chosen]]


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
        gap = study.minus(arm, "anGPT")
        onset = study.onset_minus(arm, "anGPT", 3.3)
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
    first = Study("compute_optimal/1.3m-tuned")
    later = Study("bridge/plain-1.3m")
    rows = []
    for label, (key, arm) in TUNED.items():
        best = first.best_tuned_loss(key)
        assert first.seeds(arm) == later.seeds(arm)[:2]
        rows.append([label, figure(best), *later.seeds(arm), later.mean(arm)])
    return rows


@table(ARCHITECTURES, "Equal tuning at 1.3M parameters", 1)
def settings_of_equal_tuning() -> Rows:
    tuning = read_record("compute_optimal/1.3m-tuned/report.json")["tuning"]
    gpt_entries = sorted(tuning["gpt"], key=itemgetter("loss"))
    angpt_entries = sorted(tuning["angpt"], key=itemgetter("loss"))
    rows = []
    for gpt, angpt in zip(gpt_entries, angpt_entries, strict=True):
        gpt_cells = [describe(gpt["setting"], "gpt"), figure(gpt["loss"])]
        angpt_cells = [describe(angpt["setting"], "angpt"), figure(angpt["loss"])]
        rows.append([*gpt_cells, *angpt_cells])
    return rows


def describe(setting: dict[str, float], arm: str) -> str:
    """`rate 0.004, warm-up 40 %`."""
    items = [f"rate {setting['lr']:g}"]
    if arm == "angpt":
        scale = setting.get("alpha_scale")
        items.append(f"α's scale {scale:g}" if scale else "α's scale 1/√d")
    if setting.get("warmup"):
        items.append(f"warm-up {setting['warmup']:.0%}".replace("%", " %"))
    if setting.get("init_std"):
        items.append(f"weights of {setting['init_std']:g}")
    return ", ".join(items)


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
        entropy_of_layers = entropy[:, :, -1].mean(axis=1)  # over heads, at the longest contexts
        mean = study.mean(arm, seeds=(1, 2))
        sharpest = figure(entropy_of_layers.min())
        rows.append([label, *study.seeds(arm)[:2], mean, sharpest, saving(diagnosis)])
    return rows


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
        onsets = listed(study.onsets(arm, 3.0).values())
        rows.append([label, *filled(study.seeds(arm), 3), study.mean(arm), onsets])
    return rows


def filled(cells: list[str], n: int) -> list[str]:
    return cells + [EMPTY] * (n - len(cells))


@table(ARCHITECTURES, "The norm of attention's average", 1)
def norm_of_average_of_a_small_model() -> Rows:
    """Bold runs copy. The record does not say which do, so bold is not compared."""
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
        if arm == "GPT+":
            mean += ", two groups"
        has_gap = len(losses) > 1 and arm != "anGPT"
        gap = study.minus(arm, "anGPT") if has_gap else EMPTY
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
            arm = name + attention
            baseline = "GPT+" + attention
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
    """The record has no saving of a copy: `trainer/dynamics.yaml` logged it."""
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
        suffix = "" if tokens == "20" else f"-{tokens}"
        study = Study(f"compute_optimal/0.4m{suffix}")
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
        arms = ["nGPT" + attention, "anGPT" + attention]
        rows.append([baseline, study.mean(baseline), EMPTY, EMPTY])
        for arm in arms:
            p = figure(study.p_holm(arm, baseline, arms))
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
    seconds = seconds_per_token("convergence/demo/paired_steps.json")
    arms = {
        "nGPT": ("nGPT", "ngpt"),
        "anGPT": ("anGPT", "angpt"),
        "anGPT, scale-invariant attention": ("anGPT, scale-invariant", "angpt-scale-invariant"),
    }
    rows = [["GPT+", study.mean("GPT+"), "1", "1", "1"]]
    for label, (arm, key) in arms.items():
        ratios = np.array(seconds[key]) / np.array(seconds["gpt"])
        time = median_with_interval(list(ratios))
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
                best = best_of_batch(tuning[f"{arm}_d_model={width}"], batch)
                cells.append(f"{figure(best['loss'])}, {best['setting']['lr']:g}")
            rows.append(cells)
    return rows


def best_of_batch(entries: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """Return the tuning entry of this batch size with the lowest loss."""
    entries_of_batch = []
    for entry in entries:
        if entry["setting"]["batch_size"] == batch:
            entries_of_batch.append(entry)
    return min(entries_of_batch, key=itemgetter("loss"))


@table(ARCHITECTURES, "From GPT+ to anGPT")
def ablation() -> Rows:
    """The last column has the paper's numbers."""
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
    mean = study.mean_loss(baseline)
    rows = []
    for label, (arm, paper_cell) in arms.items():
        test = study.test(arm, baseline)
        change = figure(100 * test.difference / mean)
        low = figure(100 * test.low / mean)
        high = figure(100 * test.high / mean)
        rows.append([label, f"{change} % ({low} … {high})", paper_cell])
    return rows

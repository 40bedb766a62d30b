"""Figures in sentences of all other sections of architectures.md."""

import csv
import math
from collections.abc import Iterator

import numpy as np

from anlit.compare.statistics import median_with_interval, power_law
from tests.docs.architecture_tables import FIRST_STEPS, first_steps
from tests.docs.page_tables import ARCHITECTURES
from tests.docs.records import (
    RESULTS,
    Study,
    column,
    figure,
    listed,
    read_record,
    seconds_per_token,
)
from tests.docs.result_claims import corrected
from tests.docs.section_claims import extremes, from_and, from_to, section


@section(ARCHITECTURES, "Depth")
def depth() -> Iterator[str]:
    study = Study("depth")

    def losses(arm: str, layers: int) -> dict[int, float]:
        return study.losses(f"{arm}, layers {layers}, width 64")

    late = listed(losses("anGPT", 4).values())
    yield f"one run of GPT+ ({figure(losses('GPT+', 4)[1])}) and both of anGPT ({late})"
    behind = figure(losses("nGPT", 2)[1] - losses("GPT+", 2)[1])
    ahead = figure(losses("GPT+", 4)[1] - losses("nGPT", 4)[1])
    yield f"ends {behind} behind GPT+ at two layers and {ahead} ahead at four"


@section(ARCHITECTURES, "anGPT at depth")
def angpt_at_depth() -> Iterator[str]:
    study = Study("angpt_depth/12")
    yield f"A quarter of α costs {study.minus('α 1/(4L)', 'α 1/(2L)')} at twelve layers"
    _, second = first_steps("angpt_depth/12/first_steps.csv", "full-alpha", "train/loss")
    yield f"the loss of seed 2 rose to {max(second[1:]):.1f}, and the run recovered"
    _, second, *_ = first_steps(FIRST_STEPS, "half-alpha", "copying/first")
    yield f"seed 2 had a loss of {second[-1]:.0f} on random tokens"
    on_random_tokens = first_steps(FIRST_STEPS, "quarter-alpha", "copying/first")
    yield f"no seed had more than {max(map(max, on_random_tokens)):.1f} there"
    norms = max(map(max, first_steps(FIRST_STEPS, "half-alpha", "train/grad_norm")))
    *_, third, _ = first_steps(FIRST_STEPS, "full-alpha", "train/grad_norm")
    yield f"It was up to {norms:.0f} with 1/(2L), and up to {max(third):.0f} in the run that ended"
    gpt, ngpt, angpt = map(study.mean, ("GPT+", "nGPT", "α 1/(2L)"))
    yield f"GPT+ ends at {gpt}, nGPT at {ngpt}, anGPT with 1/(2L) at {angpt}"


@section(ARCHITECTURES, "Defaults")
def defaults() -> Iterator[str]:
    study = Study("defaults/0.4m")
    _, fresh_default = study.seeds("GPT+, defaults")
    tuned, fresh_tuned = study.seeds("GPT+, tuned")
    yield f"The tuned best ends at {tuned} on that seed"
    yield f"Seed 2 is fresh: {fresh_default} against {fresh_tuned}."


@section(ARCHITECTURES, "1.3M parameters")
def one_million() -> Iterator[str]:
    study = Study("compute_optimal/1.3m")
    baseline = study.mean_loss("GPT+")
    lags = []
    for arm in study.curves:
        if arm.startswith("anGPT"):
            lags.append(study.mean_loss(arm) - baseline)
    yield f"of five settings and ends {from_to(lags)} higher"
    p_ngpt, *_ = corrected("nGPT", "GPT+", "compute_optimal/1.3m")
    *_, p_angpt = corrected("anGPT, half the rate", "GPT+", "compute_optimal/1.3m")
    assert figure(p_ngpt) == figure(p_angpt)
    yield f"(p = {figure(p_ngpt)} each, Holm)"
    losses: list[float] = []
    for arm in ("anGPT", "anGPT, half the rate", "anGPT, a quarter of the rate"):
        losses += study.losses(arm).values()
    yield f"end between {from_and(losses)}."
    gained = gain_of_half_the_rate(Study("compute_optimal/1.3m-first"))
    lost = -gain_of_half_the_rate(study)
    gain = f"Half of the rate gained {figure(gained)} in one study"
    yield f"{gain} and lost {figure(lost)} in the other"


def gain_of_half_the_rate(study: Study) -> float:
    return study.losses("anGPT")[1] - study.losses("anGPT, half the rate")[1]


@section(ARCHITECTURES, "Scale-invariant attention")
def scale_invariant_attention() -> Iterator[str]:
    late = Study("depth").seeds("anGPT, layers 4, width 64")
    yield f"two runs of that anGPT end at {' and '.join(late[:2])}"
    seconds = seconds_per_token("compute_optimal/0.4m-attention/paired_steps.json")

    def ratio(arm: str) -> str:
        ratios = np.array(seconds[f"{arm}-si"]) / np.array(seconds[arm])
        return figure(median_with_interval(list(ratios)).median)

    yield f"A step takes {ratio('gpt')} (GPT+) and {ratio('ngpt')} (nGPT, anGPT)"
    yield f"and {ratio('angpt')} (nGPT, anGPT) times as long"


@section(ARCHITECTURES, "0.4M parameters")
def small_model() -> Iterator[str]:
    runs = read_record("compute_optimal/0.4m/copies.json") + read_record("copying/copies.json")
    copying = []
    not_copying = []
    for run in runs:
        if run["final_loss"] < 2.65:
            copying.append(run)
        else:
            not_copying.append(run)

    falls = from_to(column(copying, "steepest_fall"))
    losses = from_and(column(copying, "final_loss"))
    yield f"Runs that lose {falls} nats within 130 steps end between {losses}"
    low, high = extremes(column(copying, "second_copy"))
    without_copies = from_to(column(not_copying, "second_copy"))
    yield f"({low} … {high} nats per token, against {without_copies})"
    yield f"The other runs end between {from_and(column(not_copying, 'final_loss'))}."

    study = Study("compute_optimal/0.4m")
    mean = figure(study.mean_loss("GPT+"))
    best = figure(study.best_tuned_loss("gpt"))
    yield f"On it GPT+'s best came to {best}, and to {mean} on the other seeds"


@section(ARCHITECTURES, "The same model on fewer tokens")
def fewer_tokens() -> Iterator[str]:
    study = Study("compute_optimal/0.4m-0.6")
    gpt = figure(study.best_tuned_loss("gpt"))
    ngpt = figure(study.best_tuned_loss("ngpt"))
    angpt = figure(study.best_tuned_loss("angpt"))
    folder = RESULTS / "compute_optimal/0.4m-0.6/initial_weights"
    with (folder / "lr0.008-wu0.4-std0.05.csv").open(newline="") as file:
        *_, last_row = csv.DictReader(file)
    larger = figure(float(last_row["val/loss"]))
    yield f"0.05 takes it from {gpt} to {larger} (nGPT {ngpt}, anGPT {angpt})"


@section(ARCHITECTURES, "Sizes and lengths")
def sizes_and_lengths() -> Iterator[str]:
    study = Study("copying")
    baseline = "GPT+, rate 0.008, warm-up 40 %"
    lower = study.lower("nGPT, s_z's scale 1", baseline)
    yield f"nGPT ends {lower.replace(' (', ' lower (')}"
    yield f"anGPT {study.minus('anGPT', baseline).replace(' (', ' higher (')}"


@section(ARCHITECTURES, "Convergence")
def convergence() -> Iterator[str]:
    study = Study("convergence/cpu")
    p_values = []
    for qk_norm in ("", ", no QK-norm"):
        arms = ["nGPT" + qk_norm, "anGPT" + qk_norm]
        for arm in arms:
            p_values.append(study.p_holm(arm, "GPT+" + qk_norm, arms))
    yield f"(p, Holm: {listed(p_values)})"


@section(ARCHITECTURES, "The demo")
def demo() -> Iterator[str]:
    study = Study("convergence/demo")
    arms = ("nGPT", "anGPT", "anGPT, scale-invariant")
    p_values = []
    for arm in arms:
        p_values.append(study.p_holm(arm, "GPT+", arms))
    yield f"(p = {listed(p_values)})"


@section(ARCHITECTURES, "Rate and batch size over size")
def rate_and_batch_size() -> Iterator[str]:
    record = read_record("hyperparameters-cpu/report.json")
    parameters = []
    rates = []
    for point in record["points"]:
        if point["arm"].startswith("angpt"):
            parameters.append(point["values"]["parameters"])
            rates.append(point["values"]["lr"])
    law = power_law(parameters, rates)
    assert law is not None
    exponent = law[1]
    yield f"exponent is determined ({listed(exponent[:2])} … {figure(exponent.high)})"

    losses = {}
    best: dict[tuple[str, int], float] = {}
    for arm, entries in record["tuning"].items():
        for entry in entries:
            batch = entry["setting"]["batch_size"]
            loss = entry["loss"]
            losses[arm, batch, entry["setting"]["lr"]] = loss
            best[arm, batch] = min(loss, best.get((arm, batch), math.inf))

    def lost(arm: str) -> str:
        name = f"{arm}_d_model=128"
        return figure(losses[name, 2, 0.016] - losses[name, 2, 0.004])

    yield f"batch 2, GPT+ loses {lost('gpt')}, anGPT {lost('angpt')} and nGPT {lost('ngpt')}"
    wide_costs = {}
    narrow_costs = []
    for arm in record["tuning"]:
        cost = best[arm, 8] - best[arm, 2]
        name, _, width = arm.partition("_d_model=")
        if width == "128":
            wide_costs[name] = figure(cost)
        else:
            narrow_costs.append(cost)
    gpt = wide_costs["gpt"]
    yield f"costs GPT+ {gpt}, nGPT {wide_costs['ngpt']} and anGPT {wide_costs['angpt']}"
    yield f"At 64 and 32 it is between {from_and(narrow_costs)}."


@section(ARCHITECTURES, "From GPT+ to anGPT")
def ablation() -> Iterator[str]:
    study = Study("ablation-cpu")
    baseline = "GPT+, no QK-norm"
    yield f"QK-norm's gain has p = {figure(study.p('GPT+', baseline))}, uncorrected"
    bounded = study.test("nGPT, norms bounded", baseline).difference
    strict = study.test("nGPT (strict norms)", baseline).difference
    mean = study.mean_loss(baseline)
    bounded_share = figure(float(100 * bounded / mean))
    strict_share = figure(float(100 * strict / mean))
    yield f"here ({bounded_share} against {strict_share} %, {figure(bounded - strict)} apart)"

"""Figures in sentences about the studies between nGPT, anGPT and GPT+ on architectures.md."""

import math
from collections.abc import Iterator
from itertools import filterfalse
from pathlib import Path

import numpy as np

from anlit.compare.crossings import tokens_to_loss
from anlit.runs.folders import Curve
from tests.docs.page_tables import ARCHITECTURES
from tests.docs.records import (
    Study,
    curve_of,
    figure,
    read_record,
)
from tests.docs.result_claims import corrected, leading, opened
from tests.docs.section_claims import from_to, section


@section(ARCHITECTURES, "A bridge from nGPT")
def bridge() -> Iterator[str]:
    study = Study("bridge/plain")
    p_values = corrected("nGPT", "anGPT", "bridge/plain", "bridge/onset")
    p_values += corrected("anGPT", "nGPT", "bridge/plain", "bridge/onset")
    yield f", Holm {from_to(p_values)})."
    after_gpt = study.onset_minus("anGPT", "GPT+", 3.3)
    yield f"a loss of 3.3 later than GPT+ by {after_gpt.replace(' (', 'M tokens (')}"
    after_ngpt = study.onset_minus("anGPT", "nGPT", 3.3)
    yield f"later than nGPT by {after_ngpt.replace(' (', 'M (')}"
    losses_in_order = sorted(study.losses("GPT+").values())
    losses = list(map(figure, losses_in_order))
    yield (
        f"Two of GPT+'s runs end at {losses[4]} and {losses[5]}, four between {losses[0]} and "
        f"{losses[3]}"
    )
    shorter = Study("compute_optimal/0.4m").minus("anGPT", "GPT+")
    yield f"With 20 % GPT+ was {opened(shorter, 'ahead ')}, three seeds)"
    both = study.minus("anGPT, s_qk, SiLU of deviation 1", "anGPT")
    s_qk = study.minus("anGPT, s_qk", "anGPT")
    silu = study.minus("anGPT, SiLU of deviation 1", "anGPT")
    gain_alone = study.minus("anGPT, gain on q and k", "anGPT")
    yield (
        f"on three seeds: both parts {both}, s_qk {s_qk}, SiLU {leading(silu)}, "
        f"the gain of the QK-norm {leading(gain_alone)}."
    )


def tuning_curves() -> dict[str, Curve]:
    """Return curves on the tuning seed at 1.3M parameters by the run's name."""
    curves = {}
    for name, run in read_record("compute_optimal/1.3m-tuned/report.json")["measured"].items():
        if run["seed"] == 0:
            curves[Path(name).name.partition("_seed=")[0]] = curve_of(run)
    return curves


def tuned_loss(settings: str) -> float:
    """Return anGPT's final loss, by the end of the run's name."""
    return float(tuning_curves()[f"angpt_alpha_scale={settings}"].loss[-1])


@section(ARCHITECTURES, "Equal tuning at 1.3M parameters")
def equal_tuning() -> Iterator[str]:
    study = Study("bridge/plain-1.3m")
    late = from_to(study.onsets("anGPT", 3.0).values(), "M")
    early = from_to(study.onsets("GPT+", 3.0).values(), "M")
    yield f"A loss of 3.0 comes after {late} tokens against {early}."
    half, tuned, twice = map(tuned_loss, ("0.3_lr=0.00275", "0.3_lr=0.0055", "0.3_lr=0.011"))
    spread = max(half, tuned, twice) - min(half, tuned, twice)
    gained = tuned - tuned_loss("0.3_lr=0.0055_warmup=0.2")
    yield f"end within {figure(spread)}, a warm-up gains {figure(gained)}."
    above = figure(tuned_loss("0.001_lr=0.0055") - tuned)
    yield f"A scale of 0.001, which [anGPT]'s Table F.2 may mean, ends {above} above 0.3"


@section(ARCHITECTURES, "The gain on queries and keys")
def gain() -> Iterator[str]:
    study = Study("bridge/plain-1.3m")
    seeds = (1, 2)
    gap = leading(study.minus("anGPT", "GPT+", seeds))
    yield f"Unchanged, anGPT is {gap} behind on the same two seeds"
    bounded = "GPT+, no gain on q and k"
    with_gain = "anGPT, gain on q and k"
    pairs = [
        (with_gain, "GPT+"),
        ("anGPT", bounded),
        (bounded, "GPT+"),
        (with_gain, "anGPT"),
        ("anGPT", "GPT+"),
    ]
    p_values = []
    for arm, baseline in pairs:
        p_values.append(study.p(arm, baseline, seeds))
    yield f"(before it p from {from_to(p_values)})"

    highest = math.sqrt(32)
    share = figure(math.exp(highest) / (math.exp(highest) + 255))
    yield f"is above √D, {figure(highest)} at this width. Of 256 keys one then gets {share} of"
    later = study.onset_minus("anGPT", "GPT+", 3.0).replace(" (", "M tokens (")
    yield f"A loss of 3.0 comes {later} later"
    yield later_and_lower()
    distance_gain = figure(math.sqrt(2 * math.log(1 + 100 / 10) + 1))
    yield f"multiplies scores by a(t), {distance_gain} at a distance of 100"


def is_angpt(run_name: str) -> bool:
    return run_name.startswith("angpt")


def later_and_lower() -> str:
    """Compare the earliest anGPT with the two GPT+ of its seed that reach 3.0 after it."""
    curves = tuning_curves()
    onsets: dict[str, float] = {}
    for name, curve in curves.items():
        onsets[name] = tokens_to_loss(curve, 3.0) or math.inf
    names = sorted(onsets, key=onsets.__getitem__)
    earliest = next(filter(is_angpt, names))
    later_names = filterfalse(is_angpt, names[names.index(earliest) :])
    first, second, *never = later_names
    assert {onsets[name] for name in never} <= {math.inf}

    def millions(name: str) -> str:
        return figure(onsets[name] / 1e6)

    def lower(name: str) -> str:
        return figure(curves[earliest].loss[-1] - curves[name].loss[-1])

    return (
        f"at {millions(first)}M and {millions(second)}M against {millions(earliest)}M, "
        f"and end {lower(first)} and {lower(second)} lower"
    )


@section(ARCHITECTURES, "The norm of attention's average")
def norm_of_average() -> Iterator[str]:
    study = Study("bridge/plain-1.3m")
    both = "anGPT, gain, unit norm of each head's average"
    normed = "GPT+, norm of each head's average"
    lag = leading(study.minus("anGPT", "GPT+"))
    yield f"{leading(study.minus(both, normed))} of a lag of {lag} is left"
    yield f"about a third of the lag of {lag}"
    late = from_to(study.onsets(both, 3.0).values(), "M")
    early = from_to(study.onsets("anGPT", 3.0).values(), "M")
    yield f"comes after {late} tokens in place of {early}"
    earlier = study.onset_minus("anGPT", both, 3.0)
    interval = earlier.partition("(")[2].rstrip(")").replace(" …", "M …")
    yield f"({leading(earlier)}M earlier, {interval}M)"
    lowered = opened(study.lower(normed, "GPT+"))
    p = figure(study.p(normed, "GPT+"))
    holm = figure(corrected(normed, "GPT+", "bridge/plain-1.3m")[0])
    yield f"The norm lowers GPT+'s loss too, by {lowered}, p = {p}, Holm {holm})"


@section(ARCHITECTURES, "The norm of attention's average")
def norm_of_average_of_a_small_model() -> Iterator[str]:
    study = Study("bridge/onset")
    alone = "anGPT, unit norm of each head's average"
    normed = "GPT+, norm of each head's average"
    plain_diagnosis = read_record("bridge/onset/attention/angpt.json")
    normed_diagnosis = read_record("bridge/onset/attention/angpt-attention_norm.json")
    squares = np.array(plain_diagnosis["lengths"]["256"]["statistics"]["squared_average"])
    yield f"has averages of {from_to(np.sqrt(squares).mean(axis=1)[:, -1])} of the length"
    saved = []
    for diagnosis in (plain_diagnosis, normed_diagnosis):
        saved.append(figure(diagnosis["copying"]["first"] - diagnosis["copying"]["second"]))
    yield f"In these two runs a copy saves {' and '.join(saved)} nats"
    holm = figure(corrected(alone, "anGPT", "bridge/onset")[0])
    yield f"Holm over five arms {holm})"
    yield f"On the other four it is {study.lower(alone, 'anGPT', (3, 4, 5, 6))}"
    yield f"It lowers GPT+'s loss by {opened(study.lower(normed, 'GPT+'))}, three seeds)"
    yield f"With it in both anGPT is {study.minus(alone, normed).replace(' (', ' behind (')}"
    without = opened(study.minus("anGPT", "GPT+", (1, 2, 3)), "behind ")
    six_seeds = leading(study.minus("anGPT", "GPT+"))
    normed_gap = study.minus(alone, "GPT+")
    yield f"Without it, on the same three seeds, anGPT is {without})"
    yield f"anGPT is {six_seeds} behind without the norm, and {normed_gap} with the norm"

"""Figures in sentences of sections on the pages of results, computed from the records."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from anlit.compare.statistics import median_with_interval, power_law, tokens_to_loss
from anlit.runs.folders import Curve
from tests.docs.page_tables import ARCHITECTURES, ATTENTION, SPEED
from tests.docs.records import (
    RESULTS,
    Lengths,
    Study,
    curve_of,
    figure,
    read_record,
    seconds_per_token,
)
from tests.docs.result_claims import Claim, corrected, leading, opened, total_step_seconds
from tests.docs.speed_tables import hidden_states, needles, quartiles, times_by_kernel

Sentences = Callable[[], Iterator[str]]
SECTIONS: list[tuple[str, str, Sentences]] = []
"""Page, heading, and the function that yields parts of the section's sentences."""


def section(page: str, heading: str) -> Callable[[Sentences], Sentences]:
    """Register the sentences of a section."""

    def register(sentences: Sentences) -> Sentences:
        SECTIONS.append((page, heading, sentences))
        return sentences

    return register


def section_claims() -> Iterator[Claim]:
    for page, heading, sentences in SECTIONS:
        for sentence in sentences():
            yield page, heading, sentence


def extremes(values: Iterable[float], unit: str = "") -> list[str]:
    """Return the smallest and the largest value: `8.4M`, `11.3M`."""
    values = list(values)
    return [f"{figure(value)}{unit}" for value in (min(values), max(values))]


def from_to(values: Iterable[float], unit: str = "") -> str:
    """`8.4M to 11.3M`."""
    return " to ".join(extremes(values, unit))


def from_and(values: Iterable[float]) -> str:
    """`8.4 and 11.3`."""
    return " and ".join(extremes(values))


@section(ARCHITECTURES, "Depth")
def depth() -> Iterator[str]:
    study = Study("depth")

    def losses(arm: str, layers: int) -> dict[int, float]:
        return study.losses(f"{arm}, layers {layers}, width 64")

    late = ", ".join(map(figure, losses("anGPT", 4).values()))
    yield f"one run of GPT+ ({figure(losses('GPT+', 4)[1])}) and both of anGPT ({late})"
    behind = figure(losses("nGPT", 2)[1] - losses("GPT+", 2)[1])
    ahead = figure(losses("GPT+", 4)[1] - losses("nGPT", 4)[1])
    yield f"ends {behind} behind GPT+ at two layers and {ahead} ahead at four"


@section(ARCHITECTURES, "Defaults")
def defaults() -> Iterator[str]:
    study = Study("defaults/0.4m")
    _, fresh_default = study.seeds("GPT+, defaults")
    tuned, fresh_tuned = study.seeds("GPT+, tuned")
    yield f"The tuned best ends at {tuned} on that seed"
    yield f"Seed 2 is fresh: {fresh_default} against {fresh_tuned}."


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
    losses = [figure(loss) for loss in sorted(study.losses("GPT+").values())]
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


@section(ARCHITECTURES, "Equal tuning at 1.3M parameters")
def equal_tuning() -> Iterator[str]:
    study = Study("bridge/plain-1.3m")
    late = from_to(study.onsets("anGPT", 3.0).values(), "M")
    early = from_to(study.onsets("GPT+", 3.0).values(), "M")
    yield f"A loss of 3.0 comes after {late} tokens against {early}."
    finals = {name: float(curve.loss[-1]) for name, curve in tuning_curves().items()}
    tuned = finals["angpt_alpha_scale=0.3_lr=0.0055"]
    rates = [finals[f"angpt_alpha_scale=0.3_lr={lr}"] for lr in ("0.00275", "0.0055", "0.011")]
    gained = figure(tuned - finals["angpt_alpha_scale=0.3_lr=0.0055_warmup=0.2"])
    yield f"end within {figure(max(rates) - min(rates))}, a warm-up gains {gained}."
    above = figure(finals["angpt_alpha_scale=0.001_lr=0.0055"] - tuned)
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
    yield f"(before it p from {from_to(study.p(*pair, seeds) for pair in pairs)})"
    highest = math.sqrt(32)
    share = figure(math.exp(highest) / (math.exp(highest) + 255))
    yield f"is above √D, {figure(highest)} at this width. Of 256 keys one then gets {share} of"
    later = study.onset_minus("anGPT", "GPT+", 3.0).replace(" (", "M tokens (")
    yield f"A loss of 3.0 comes {later} later"
    yield later_and_lower()
    distance_gain = figure(math.sqrt(2 * math.log(1 + 100 / 10) + 1))
    yield f"multiplies scores by a(t), {distance_gain} at a distance of 100"


def later_and_lower() -> str:
    """Compare the earliest anGPT with the two GPT+ that reach 3.0 after it, all on one seed."""
    curves = tuning_curves()
    onsets = {name: tokens_to_loss(curve, 3.0) or math.nan for name, curve in curves.items()}
    angpt_names = [name for name in onsets if name.startswith("angpt")]
    earliest = min(angpt_names, key=onsets.__getitem__)
    slower = [name for name in onsets if name.startswith("gpt") and onsets[name] > onsets[earliest]]
    first, second = sorted(slower, key=onsets.__getitem__)

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


@section(ARCHITECTURES, "1.3M parameters")
def one_million() -> Iterator[str]:
    study = Study("compute_optimal/1.3m")
    baseline = study.mean_loss("GPT+")
    arms = [arm for arm in study.curves if arm.startswith("anGPT")]
    lags = from_to(study.mean_loss(arm) - baseline for arm in arms)
    yield f"of five settings and ends {lags} higher"
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
    yield f"Half of the rate gained {figure(gained)} in one study and lost {figure(lost)} in the other"


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
    copying = [run for run in runs if run["final_loss"] < 2.65]
    not_copying = [run for run in runs if run["final_loss"] > 2.65]
    falls = from_to(run["steepest_fall"] for run in copying)
    losses = from_and(run["final_loss"] for run in copying)
    yield f"Runs that lose {falls} nats within 130 steps end between {losses}"
    low, high = extremes(run["second_copy"] for run in copying)
    without_copies = from_to(run["second_copy"] for run in not_copying)
    yield f"({low} … {high} nats per token, against {without_copies})"
    yield f"The other runs end between {from_and(run['final_loss'] for run in not_copying)}."
    study = Study("compute_optimal/0.4m")
    mean = figure(study.mean_loss("GPT+"))
    yield f"On it GPT+'s best came to {figure(study.best_tuned_loss('gpt'))}, and to {mean} on the other seeds"


@section(ARCHITECTURES, "The same model on fewer tokens")
def fewer_tokens() -> Iterator[str]:
    study = Study("compute_optimal/0.4m-0.6")
    gpt = figure(study.best_tuned_loss("gpt"))
    ngpt = figure(study.best_tuned_loss("ngpt"))
    angpt = figure(study.best_tuned_loss("angpt"))
    folder = RESULTS / "compute_optimal/0.4m-0.6/initial_weights"
    lines = (folder / "lr0.008-wu0.4-std0.05.csv").read_text().splitlines()
    column = lines[0].split(",").index("val/loss")
    larger = figure(float(lines[-1].split(",")[column]))
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
            p_values.append(figure(study.p_holm(arm, "GPT+" + qk_norm, arms)))
    yield f"(p, Holm: {', '.join(p_values)})"


@section(ARCHITECTURES, "The demo")
def demo() -> Iterator[str]:
    study = Study("convergence/demo")
    arms = ("nGPT", "anGPT", "anGPT, scale-invariant")
    p_values = [figure(study.p_holm(arm, "GPT+", arms)) for arm in arms]
    yield f"(p = {', '.join(p_values)})"


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
    median_and_low = ", ".join(map(figure, exponent[:2]))
    yield f"exponent is determined ({median_and_low} … {figure(exponent.high)})"
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
    costs = {arm: best[arm, 8] - best[arm, 2] for arm in record["tuning"]}

    def cost(arm: str) -> str:
        return figure(costs[f"{arm}_d_model=128"])

    yield f"costs GPT+ {cost('gpt')}, nGPT {cost('ngpt')} and anGPT {cost('angpt')}"
    narrow = [cost for arm, cost in costs.items() if not arm.endswith("128")]
    yield f"At 64 and 32 it is between {from_and(narrow)}."


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


@section(ATTENTION, "Mechanisms by length at 20 tokens per parameter")
def mechanisms_by_length() -> Iterator[str]:
    lengths = Lengths("attention/0.4m/lengths")

    def gap_at_training_length(arm: str, other_arm: str) -> str:
        losses = lengths.losses[arm, True][256]
        other_losses = lengths.losses[other_arm, True][256]
        return figure(float(np.mean(losses) - np.mean(other_losses)))

    yield f"added loss at 16 times it ({lengths.row('scale-invariant')[2]})"
    yield f"ends {gap_at_training_length('rope', 'scale-invariant')} below plain attention"
    yield f"ALiBi ends {gap_at_training_length('alibi', 'rope')} above plain attention"
    seed_losses = lengths.losses["scale-invariant", True][16384]
    yield f"its two seeds differ by {figure(abs(seed_losses[0] - seed_losses[1]))} nats at 16,384"

    def unmasked(arm: str) -> str:
        return leading(lengths.row(arm, masking=False)[3])

    yield (
        f"at 16,384 plain attention on RoPE {unmasked('rope')}, scale-invariant "
        f"{unmasked('scale-invariant')}, ALiBi {unmasked('alibi')}"
    )
    base = Lengths("attention/0.4m-base/lengths")
    loss, *added = base.row("scale-invariant")
    yield f"ends at {loss} and loses more beyond, {added[0]}, {added[1]} and {added[2]}"

    accuracies = {row[0]: leading(row[4]) for row in needles()}
    alibi = "ALiBi"
    invariant = "scale-invariant, p-RoPE"
    yield (
        f"At 16 times it ALiBi finds {accuracies[alibi]}, scale-invariant attention "
        f"{accuracies[invariant]}, the others none"
    )
    assert {label for label, share in accuracies.items() if float(share) > 0} == {alibi, invariant}


@section(ATTENTION, "Changing a trained model's attention")
def changed_attention() -> Iterator[str]:
    yield f"guessing digits gives {figure(-math.log(10))}"


@section("nu_att.md", "Does anGPT's attention want its missing factor?")
def missing_factor() -> Iterator[str]:
    lengths = Lengths("attention/short/nu_att")

    def loss_at_4096(scaling: str) -> float:
        arm = f"angpt-scale-invariant_output_scaling={scaling}"
        return float(np.mean(lengths.losses[arm, True][4096]))

    gained = figure(loss_at_4096("none") - loss_at_4096("gaussian"))
    yield f"it gains {gained} for scale-invariant attention"


@section(SPEED, "A training step")
def training_step() -> Iterator[str]:
    speed = {}
    for target in read_record("step_cpu/xeon/step-cpu.json")["targets"]:
        speed[target["what"]] = leading(target["measured"])
    litgpt = speed["eager: GPT+'s speed beside litgpt's GPT"]
    yield f"just misses it against litgpt ({litgpt})"
    single = Study("copying")
    half = Study("compute_optimal/0.4m-attention")
    gpt = leading(single.mean("GPT+, rate 0.008, warm-up 40 %"))
    ngpt = leading(single.mean("nGPT, s_z's scale 1"))
    angpt = leading(single.mean("anGPT"))
    yield f"end at means of {gpt}, {ngpt} and {angpt} in float32"
    gpt, ngpt, angpt = (leading(half.mean(arm)) for arm in ("GPT+", "nGPT", "anGPT"))
    yield f"at {gpt}, {ngpt} and {angpt} in bfloat16"
    ratio = total_step_seconds("bfloat16") / total_step_seconds("float32")
    yield f"a step of a small model takes {figure(ratio)} times"
    group = read_record("step_cpu/bfloat16/backends.json")["groups"][0]
    eager, sdpa, blockwise = (quartiles(row["seconds"]["train"]) for row in group["rows"])
    eager = eager.replace("(", "ms (quartiles ")
    yield f"takes {eager} with it, {blockwise} with `blockwise` and {sdpa} with `sdpa`"


@section(SPEED, "Attention")
def attention() -> Iterator[str]:
    costs = []
    for shape in read_record("attention_cpu/threads_1/attention.json")["shapes"]:
        if shape["shape"]["documents"]:
            seconds = times_by_kernel(shape)
            costs.append(seconds["scale-invariant", "blockwise"] / seconds["plain", "sdpa"])
    yield f"with packed documents {from_to(costs)} times"
    recorded_choices = []
    todays_choices = []
    for recorded, today in times_of_chosen_kernels():
        recorded_choices.append(recorded)
        todays_choices.append(today)
    yield f"took {figure(max(recorded_choices))} times the fastest in one cell"
    yield f"is within {figure(100 * max(todays_choices) - 100)} % of the fastest"


def times_of_chosen_kernels() -> Iterator[Sequence[float]]:
    """Yield, for each cell, the times of the recorded and of today's choice over the fastest."""
    for group in read_record("attention_cpu/auto/auto.json")["groups"]:
        seconds = {}
        for row in group["rows"]:
            if row["reason"] is None:
                seconds[row["kernel"]] = row["seconds"]["both"]["median"]
        fastest = min(seconds.values())
        mechanism = group["title"].partition(",")[0]
        today = "sdpa" if mechanism in ("plain", "log-n") else "blockwise"
        yield seconds[group["auto"]["chosen"]] / fastest, seconds[today] / fastest


@section(SPEED, "Memory of the loss")
def memory_of_the_loss() -> Iterator[str]:
    rows = {row["way"]: row for row in read_record("loss_memory/loss.json")["rows"]}
    megabytes = {way: figure(row["peak_bytes"] / 1e6) for way, row in rows.items()}
    yield f"the loss takes {megabytes['anlit']} MB"
    yield f"Full logits take {megabytes['full']} MB"


@section(SPEED, "Data")
def data() -> Iterator[str]:
    load = read_record("data_cpu/data.json")["environment"]["load_before"]
    yield f"(load {figure(load)} from work that had just ended)"


@section(SPEED, "Hidden states in float32")
def hidden_states_in_float32() -> Iterator[str]:
    curves = Study("bridge").curves["anGPT"]
    onsets = []
    for seed in (1, 2, 3):
        curve = curves[seed]
        onsets.append(figure(curve.tokens[curve.loss <= 3.3][0] / 1e6))
    angpt_row = hidden_states()[0]
    gaps = [float(gap) for gap in angpt_row[3].replace("−", "-").split(", ")]
    yield f"end higher, one by {figure(max(gaps))}"
    yield f"onset is at {', '.join(onsets)} million tokens with float32"

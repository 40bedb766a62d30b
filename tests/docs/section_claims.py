"""Further figures in the sections of the pages of results, as the records beside them give them."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from anlit.compare.statistics import median_with_interval, power_law, tokens_to_loss
from anlit.runs.folders import Curve
from tests.docs.page_tables import ARCHITECTURES, ATTENTION, SPEED
from tests.docs.records import RESULTS, Lengths, Study, figure, read_record
from tests.docs.result_claims import Claim, corrected, opened
from tests.docs.speed_tables import hidden_states, needles, quartiles


def bare(words: str) -> str:
    """`0.007, −0.211 … 0.225` of `0.007 (−0.211 … 0.225)`."""
    return words.replace(" (", ", ").rstrip(")")


def first(words: str) -> str:
    """`0.007` of `0.007 (−0.211 … 0.225)`."""
    return words.partition(" ")[0]


def from_to(values: Iterable[float], unit: str = "") -> str:
    """`8.4M to 11.3M`."""
    values = list(values)
    return f"{figure(min(values))}{unit} to {figure(max(values))}{unit}"


def section_claims() -> Iterator[Claim]:
    for heading, sentences in {
        "Depth": depth,
        "Defaults": defaults,
        "A bridge from nGPT": bridge,
        "Equal tuning at 1.3M parameters": equal_tuning,
        "The gain on queries and keys": gain,
        "The norm of attention's average": norm_of_average,
        "1.3M parameters": one_million,
        "Scale-invariant attention": scale_invariant_attention,
        "0.4M parameters": small_model,
        "The same model on fewer tokens": fewer_tokens,
        "Sizes and lengths": sizes_and_lengths,
        "Convergence": convergence,
        "The demo": demo,
        "Rate and batch size over size": rate_and_batch_size,
        "From GPT+ to anGPT": ablation,
    }.items():
        for words in sentences():
            yield ARCHITECTURES, heading, words
    for words in mechanisms_by_length():
        yield ATTENTION, "Mechanisms by length at 20 tokens per parameter", words
    for words in changed_attention():
        yield ATTENTION, "Changing a trained model's attention", words
    lengths = Lengths("attention/short/nu_att")
    plain, factor = (
        np.mean(lengths.losses[f"angpt-scale-invariant_output_scaling={name}", True][4096])
        for name in ("none", "gaussian")
    )
    gained = f"it gains {figure(plain - factor)} for scale-invariant attention"
    yield "nu_att.md", "Does anGPT's attention want its missing factor?", gained
    for heading, words in speed():
        yield SPEED, heading, words


def depth() -> Iterator[str]:
    study = Study("depth")
    losses = {
        (arm, layers): study.losses(f"{arm}, layers {layers}, width 64")
        for arm in ("GPT+", "anGPT", "nGPT")
        for layers in (2, 4)
    }
    late = [figure(loss) for loss in losses["anGPT", 4].values()]
    yield f"one run of GPT+ ({figure(losses['GPT+', 4][1])}) and both of anGPT ({', '.join(late)})"
    behind = figure(losses["nGPT", 2][1] - losses["GPT+", 2][1])
    ahead = figure(losses["GPT+", 4][1] - losses["nGPT", 4][1])
    yield f"ends {behind} behind GPT+ at two layers and {ahead} ahead at four"


def defaults() -> Iterator[str]:
    study = Study("defaults/0.4m")
    (own, fresh), (tuned, tuned_fresh) = (
        map(figure, study.losses(f"GPT+, {arm}").values()) for arm in ("defaults", "tuned")
    )
    yield f"0.02 with 40 % at {own}, the tuned best at {tuned}. Seed 2 is fresh: {fresh} against "
    yield f"{fresh} against {tuned_fresh}."


def bridge() -> Iterator[str]:
    study = Study("bridge/plain")
    p_values = corrected("nGPT", "anGPT", "bridge/plain", "bridge/onset")
    p_values += corrected("anGPT", "nGPT", "bridge/plain", "bridge/onset")
    yield f", Holm {from_to(p_values)}), six seeds"
    gpt, ngpt = (study.onset_minus("anGPT", arm, 3.3) for arm in ("GPT+", "nGPT"))
    yield f"its loss is 3.3 after GPT+'s by {gpt.replace(' (', 'M tokens (')}"
    yield f"after nGPT's by {ngpt.replace(' (', 'M (')}"
    losses = sorted(study.losses("GPT+").values())
    yield (
        f"Two of GPT+'s runs end at {figure(losses[4])} and {figure(losses[5])}, four between "
        f"{figure(losses[0])} and {figure(losses[3])}"
    )
    shorter = Study("compute_optimal/0.4m").minus("anGPT", "GPT+")
    yield f"With 20 % GPT+ was {opened(shorter, 'ahead ')}, three seeds)"
    parts = {
        arm: study.minus(f"anGPT, {arm}", "anGPT")
        for arm in ("s_qk, SiLU of deviation 1", "s_qk", "SiLU of deviation 1", "gain on q and k")
    }
    both, s_qk, silu, gain_alone = parts.values()
    yield (
        f"(three seeds: both {bare(both)}; s_qk {bare(s_qk)}; SiLU {first(silu)}; "
        f"the gain {first(gain_alone)})"
    )


def tuning_curves() -> dict[str, Curve]:
    """Curves on the tuning seed at 1.3M parameters by the run's name."""
    curves = {}
    for name, run in read_record("compute_optimal/1.3m-tuned/report.json")["measured"].items():
        if run["seed"] == 0:
            columns = [np.array(run["curve"][key], float) for key in ("tokens", "seconds", "loss")]
            curves[Path(name).name.partition("_seed=")[0]] = Curve(*columns)
    return curves


def equal_tuning() -> Iterator[str]:
    study = Study("bridge/plain-1.3m")
    late, early = (study.onsets(arm, 3.0).values() for arm in ("anGPT", "GPT+"))
    yield f"a loss of 3.0 comes after {from_to(late, 'M')} tokens against {from_to(early, 'M')}."
    finals = {name: float(curve.loss[-1]) for name, curve in tuning_curves().items()}
    scale, rate = "angpt_alpha_scale=0.3_lr=", "angpt_alpha_scale=0.001_lr=0.0055"
    same = finals[f"{scale}0.0055"]
    rates = [finals[f"{scale}{lr}"] for lr in ("0.00275", "0.0055", "0.011")]
    warm = same - finals[f"{scale}0.0055_warmup=0.2"]
    yield f"end within {figure(max(rates) - min(rates))}, a warm-up gains {figure(warm)}."
    yield f"A scale of 0.001, which [anGPT]'s Table F.2 may mean, ends {figure(finals[rate] - same)} above 0.3"


def gain() -> Iterator[str]:
    study, seeds = Study("bridge/plain-1.3m"), (1, 2)
    yield f"as they are {first(study.minus('anGPT', 'GPT+', seeds))} on the same two seeds"
    bounded, with_gain = "GPT+, no gain on q and k", "anGPT, gain on q and k"
    pairs = [(with_gain, "GPT+"), ("anGPT", bounded), (bounded, "GPT+"), (with_gain, "anGPT"),
             ("anGPT", "GPT+")]  # fmt: skip
    yield f"(before it p from {from_to(study.p(*pair, seeds) for pair in pairs)})"
    highest = math.sqrt(32)
    share = math.exp(highest) / (math.exp(highest) + 255)
    yield f"is above √D, {figure(highest)} at this width: of 256 keys one gets {figure(share)} of"
    later = study.onset_minus("anGPT", "GPT+", 3.0).replace(" (", "M tokens (")
    yield f"A loss of 3.0 comes {later} later"
    curves = tuning_curves()
    onsets = {name: tokens_to_loss(curve, 3.0) or math.nan for name, curve in curves.items()}
    earliest = min((name for name in onsets if name.startswith("angpt")), key=onsets.__getitem__)
    slower = sorted(
        (onset, name)
        for name, onset in onsets.items()
        if name.startswith("gpt") and onset > onsets[earliest]
    )
    assert len(slower) == 2
    ends = [figure(curves[earliest].loss[-1] - curves[name].loss[-1]) for _, name in slower]
    reached = [figure(onset / 1e6) for onset, _ in slower]
    yield (
        f"at {reached[0]}M and {reached[1]}M against {figure(onsets[earliest] / 1e6)}M, "
        f"and end {ends[0]} and {ends[1]} lower"
    )
    gain_per_distance = math.sqrt(2 * math.log(1 + 100 / 10) + 1)
    yield f"multiplies scores by a(t), {figure(gain_per_distance)} at a distance of 100"


def norm_of_average() -> Iterator[str]:
    study, onset = Study("bridge/plain-1.3m"), Study("bridge/onset")
    both, normed = (
        "anGPT, gain, unit norm of each head's average",
        "GPT+, norm of each head's average",
    )
    lag, rest = first(study.minus("anGPT", "GPT+")), first(study.minus(both, normed))
    yield f"{rest} of a lag of {lag} is left"
    yield f"of the lag of {lag} about a third"
    diagnoses = [
        read_record(f"bridge/onset/attention/{name}.json")
        for name in ("angpt", "angpt-attention_norm")
    ]
    squares = np.array(diagnoses[0]["lengths"]["256"]["statistics"]["squared_average"])
    yield f"has averages of {from_to(np.sqrt(squares).mean(axis=1)[:, -1])} of the length"
    copying = [diagnosis["copying"] for diagnosis in diagnoses]
    saved = [figure(record["first"] - record["second"]) for record in copying]
    yield f"by which a copy saves {saved[0]} and {saved[1]} nats"
    onsets = [study.onsets(arm, 3.0).values() for arm in (both, "anGPT")]
    yield f"comes after {from_to(onsets[0], 'M')} tokens in place of {from_to(onsets[1], 'M')}"
    earlier = study.onset_minus("anGPT", both, 3.0)
    low_high = earlier.partition("(")[2].rstrip(")").replace(" …", "M …")
    yield f"({first(earlier)}M earlier, {low_high}M)"
    lowered = opened(study.lower(normed, "GPT+"))
    p = figure(study.p(normed, "GPT+"))
    holm = figure(corrected(normed, "GPT+", "bridge/plain-1.3m")[0])
    yield f"whose loss that lowers by {lowered}, p = {p}, Holm {holm})"
    alone = "anGPT, unit norm of each head's average"
    holm = figure(corrected(alone, "anGPT", "bridge/onset")[0])
    yield f"Holm over five arms {holm})"
    yield f"on the other four it is {onset.lower(alone, 'anGPT', (3, 4, 5, 6))}"
    yield f"it lowers GPT+'s loss by {opened(onset.lower(normed, 'GPT+'))}, three seeds)"
    yield f"With it in both anGPT is {onset.minus(alone, normed).replace(' (', ' behind (')}"
    without = onset.minus("anGPT", "GPT+", (1, 2, 3))
    six = first(onset.minus("anGPT", "GPT+"))
    yield f"{without}; on six seeds {six} without it, and {onset.minus(alone, 'GPT+')}"


def one_million() -> Iterator[str]:
    study, earlier = Study("compute_optimal/1.3m"), Study("compute_optimal/1.3m-first")
    means = {arm: float(np.mean(list(study.losses(arm).values()))) for arm in study.curves}
    lags = [means[arm] - means["GPT+"] for arm in means if arm.startswith("anGPT")]
    yield f"of five settings and ends {from_to(lags)} higher"
    p_values = corrected("nGPT", "GPT+", "compute_optimal/1.3m")
    p_values += corrected("anGPT, half the rate", "GPT+", "compute_optimal/1.3m")[-1:]
    assert figure(p_values[0]) == figure(p_values[1])
    yield f"(p = {figure(p_values[0])} each, Holm)"
    rates = ("anGPT", "anGPT, half the rate", "anGPT, a quarter of the rate")
    losses = [loss for arm in rates for loss in study.losses(arm).values()]
    yield f"end between {figure(min(losses))} and {figure(max(losses))},"
    half = [
        runs.losses("anGPT")[1] - runs.losses("anGPT, half the rate")[1]
        for runs in (earlier, study)
    ]
    yield f"gained {figure(half[0])} in one study and lost {figure(-half[1])} in the other"


def scale_invariant_attention() -> Iterator[str]:
    late = [figure(loss) for loss in Study("depth").losses("anGPT, layers 4, width 64").values()]
    yield f"two runs of that anGPT end at {late[0]} and {late[1]}"
    seconds = {}
    for arm in read_record("compute_optimal/0.4m-attention/paired_steps.json")["arms"]:
        seconds[Path(arm["run"]).name.partition("_")[0]] = np.array(arm["seconds_per_token"])
    ratios = {
        arm: median_with_interval(list(seconds[f"{arm}-si"] / seconds[arm])).median
        for arm in ("gpt", "ngpt", "angpt")
    }
    yield f"A step takes {figure(ratios['gpt'])} (GPT+) and {figure(ratios['ngpt'])} (nGPT, anGPT)"
    yield f"and {figure(ratios['angpt'])} (nGPT, anGPT) times as long"


def small_model() -> Iterator[str]:
    runs = read_record("compute_optimal/0.4m/copies.json") + read_record("copying/copies.json")
    copying = [run for run in runs if run["final_loss"] < 2.65]
    others = [run for run in runs if run["final_loss"] > 2.65]
    falls = from_to(run["steepest_fall"] for run in copying)
    ends = from_to(run["final_loss"] for run in copying).replace(" to ", " and ")
    yield f"Runs that lose {falls} nats within 130 steps end between {ends}"
    copies = from_to(run["second_copy"] for run in copying).replace(" to ", " … ")
    yield f"({copies} nats per token, against {from_to(run['second_copy'] for run in others)})"
    ends = from_to(run["final_loss"] for run in others).replace(" to ", " and ")
    yield f"the others end between {ends}."
    study = Study("compute_optimal/0.4m")
    best = min(entry["loss"] for entry in study.record["tuning"]["gpt"])
    mean = np.mean(list(study.losses("GPT+").values()))
    yield f"GPT+'s best came to {figure(best)}, and to {figure(float(mean))} on the others"


def fewer_tokens() -> Iterator[str]:
    tuning = read_record("compute_optimal/0.4m-0.6/report.json")["tuning"]
    best = {arm: figure(min(entry["loss"] for entry in tuning[arm])) for arm in tuning}
    folder = RESULTS / "compute_optimal/0.4m-0.6/initial_weights"
    table = (folder / "lr0.008-wu0.4-std0.05.csv").read_text().splitlines()
    column = table[0].split(",").index("val/loss")
    larger = figure(float(table[-1].split(",")[column]))
    yield (
        f"0.05 takes it from {best['gpt']} to {larger} (nGPT {best['ngpt']}, anGPT {best['angpt']})"
    )


def sizes_and_lengths() -> Iterator[str]:
    study, warm, ngpt = Study("copying"), "GPT+, rate 0.008, warm-up 40 %", "nGPT, s_z's scale 1"
    yield f"nGPT ends {study.lower(ngpt, warm).replace(' (', ' lower (')}"
    yield f"anGPT {study.minus('anGPT', warm).replace(' (', ' higher (')}"


def convergence() -> Iterator[str]:
    study = Study("convergence/cpu")
    p_values = []
    for qk_norm in ("", ", no QK-norm"):
        arms = [name + qk_norm for name in ("nGPT", "anGPT")]
        p_values += [figure(study.p_holm(arm, "GPT+" + qk_norm, arms)) for arm in arms]
    yield f"(p, Holm: {', '.join(p_values)})"


def demo() -> Iterator[str]:
    study = Study("convergence/demo")
    arms = ("nGPT", "anGPT", "anGPT, scale-invariant")
    p_values = [figure(study.p_holm(arm, "GPT+", arms)) for arm in arms]
    yield f"(p = {', '.join(p_values)})"


def rate_and_batch_size() -> Iterator[str]:
    record = read_record("hyperparameters-cpu/report.json")
    points = [
        (point["values"]["parameters"], point["values"]["lr"])
        for point in record["points"]
        if point["arm"].startswith("angpt")
    ]
    law = power_law(*zip(*points, strict=True))
    assert law is not None
    yield f"exponent is determined ({', '.join(map(figure, law[1][:2]))} … {figure(law[1].high)})"
    losses = {
        (arm, entry["setting"]["batch_size"], entry["setting"]["lr"]): entry["loss"]
        for arm, entries in record["tuning"].items()
        for entry in entries
    }
    lost = {
        arm: losses[f"{arm}_d_model=128", 2, 0.016] - losses[f"{arm}_d_model=128", 2, 0.004]
        for arm in ("gpt", "angpt", "ngpt")
    }
    gpt, angpt, ngpt = map(figure, lost.values())
    yield f"batch 2, GPT+ loses {gpt}, anGPT {angpt} and nGPT {ngpt}"
    best: dict[tuple[str, int], float] = {}
    for (arm, batch, _), loss in losses.items():
        best[arm, batch] = min(loss, best.get((arm, batch), math.inf))
    costs = {arm: best[arm, 8] - best[arm, 2] for arm in record["tuning"]}
    gpt, ngpt, angpt = (figure(costs[f"{arm}_d_model=128"]) for arm in ("gpt", "ngpt", "angpt"))
    yield f"costs GPT+ {gpt}, nGPT {ngpt} and anGPT {angpt}"
    narrow = [cost for arm, cost in costs.items() if not arm.endswith("128")]
    yield f"it is between {from_to(narrow).replace(' to ', ' and ')}."


def ablation() -> Iterator[str]:
    study, baseline = Study("ablation-cpu"), "GPT+, no QK-norm"
    yield f"QK-norm's gain has p = {figure(study.p('GPT+', baseline))}, uncorrected"
    arms = ("nGPT, norms bounded", "nGPT (strict norms)")
    mean = np.mean(list(study.losses(baseline).values()))
    bounded, strict = (study.test(arm, baseline).difference for arm in arms)
    shares = [figure(float(100 * change / mean)) for change in (bounded, strict)]
    yield f"here ({shares[0]} against {shares[1]} %, {figure(bounded - strict)} apart)"


def mechanisms_by_length() -> Iterator[str]:
    lengths, base = Lengths("attention/0.4m/lengths"), Lengths("attention/0.4m-base/lengths")
    masked = {arm: lengths.losses[arm, True] for arm in ("scale-invariant", "rope", "alibi")}
    yield f"added loss at 16 times it ({lengths.row('scale-invariant')[2]})"
    means = {arm: np.mean(losses[256]) for arm, losses in masked.items()}
    yield f"ends {figure(float(means['rope'] - means['scale-invariant']))} below plain attention"
    yield f"ALiBi ends {figure(float(means['alibi'] - means['rope']))} above plain attention"
    one, other = masked["scale-invariant"][16384]
    yield f"its two seeds differ by {figure(abs(one - other))} nats at 16,384"
    rope, scale, alibi = (
        first(lengths.row(arm, masking=False)[3]) for arm in ("rope", "scale-invariant", "alibi")
    )
    yield f"at 16,384 plain attention on RoPE {rope}, scale-invariant {scale}, ALiBi {alibi}"
    own, *longer = base.row("scale-invariant")
    yield f"ends at {own} and loses more beyond, {longer[0]}, {longer[1]} and {longer[2]}"

    needle = {row[0]: first(row[4]) for row in needles()}
    yield (
        f"at 16 times it ALiBi finds {needle['ALiBi']}, scale-invariant attention "
        f"{needle['scale-invariant, p-RoPE']}, the others none"
    )
    found = {label for label, share in needle.items() if float(share) > 0}
    assert found == {"ALiBi", "scale-invariant, p-RoPE"}


def changed_attention() -> Iterator[str]:
    arms = {
        arm["label"]: ", ".join(figure(point["nats_per_token"]) for point in arm["lengths"])
        for arm in read_record("change_attention/needle/needle.json")["arms"]
    }
    plain, invariant = arms["GPT+, plain, RoPE"], arms["GPT+, scale-invariant"]
    yield f"4,096 tokens: plain {plain}; scale-invariant {invariant}"
    yield f"guessing digits gives {figure(-math.log(10))}"


def speed() -> Iterator[tuple[str, str]]:
    step = read_record("step_cpu/xeon/step-cpu.json")["targets"]
    measured = {target["what"]: target["measured"].split(" ")[0] for target in step}
    litgpt = measured["eager: GPT+'s speed beside litgpt's GPT"]
    yield "A training step", f"just misses it against litgpt ({litgpt})"
    single, half = Study("copying"), Study("compute_optimal/0.4m-attention")
    arms = ("GPT+, rate 0.008, warm-up 40 %", "nGPT, s_z's scale 1", "anGPT")
    means = [first(single.mean(arm)) for arm in arms]
    yield "A training step", f"end at means of {means[0]}, {means[1]} and {means[2]} in float32"
    means = [first(half.mean(arm)) for arm in ("GPT+", "nGPT", "anGPT")]
    yield "A training step", f"at {means[0]}, {means[1]} and {means[2]} in bfloat16"
    dtypes = [
        [read_record(f"step_cpu/bfloat16/{dtype}-{turn}.json")["groups"][0] for turn in (1, 2)]
        for dtype in ("bfloat16", "float32")
    ]
    medians = [
        sum(row["seconds"]["train"]["median"] for turn in turns for row in turn["rows"])
        for turns in dtypes
    ]
    yield (
        "A training step",
        f"a step of a small model takes {figure(medians[0] / medians[1])} times",
    )
    group = read_record("step_cpu/bfloat16/backends.json")["groups"][0]
    eager, sdpa, blockwise = (quartiles(row["seconds"]["train"]) for row in group["rows"])
    eager = eager.replace("(", "ms (quartiles ")
    others = f"{blockwise} with `blockwise` and {sdpa} with `sdpa`"
    yield "A training step", f"takes {eager} with it, {others}"
    costs = []
    for shape in read_record("attention_cpu/threads_1/attention.json")["shapes"]:
        if shape["shape"]["documents"]:
            seconds = {(row["mechanism"], row["kernel"]): row for row in shape["entrants"]}
            kernels = ("scale-invariant", "blockwise"), ("plain", "sdpa")
            ours, plain = (seconds[kernel]["both"]["median"] for kernel in kernels)
            costs.append(ours / plain)
    yield "Attention", f"with packed documents {from_to(costs)} times"
    chosen, today = zip(*times_of_chosen_kernels(), strict=True)
    yield "Attention", f"whose own choice was {figure(max(chosen))} in one"
    yield "Attention", f"is within {figure(100 * max(today) - 100)} % of the fastest"
    rows = {row["way"]: row for row in read_record("loss_memory/loss.json")["rows"]}
    memory = {way: figure(row["peak_bytes"] / 1e6) for way, row in rows.items()}
    share = figure(100 * rows["anlit"]["part_of_full"])
    yield "Memory of the loss", f"the loss takes {memory['anlit']} MB"
    yield "Memory of the loss", f"Full logits take {memory['full']} MB ({share} %, aim 25 %)"
    yield "Memory of the loss", f"torch's own chunked loss takes {memory['torch']} MB"
    seconds = {way: figure(row["seconds"]) for way, row in rows.items()}
    yield "Memory of the loss", f"It took {seconds['anlit']} s, full logits {seconds['full']} s"
    load = figure(read_record("data_cpu/data.json")["environment"]["load_before"])
    yield "Data", f"(load {load} from what had just ended)"
    curves = Study("bridge").curves["anGPT"]
    points = [curves[seed].tokens[curves[seed].loss <= 3.3][0] / 1e6 for seed in (1, 2, 3)]
    onsets = ", ".join(map(figure, points))
    highest = max(float(gap) for gap in hidden_states()[0][3].replace("−", "-").split(", "))
    yield "Hidden states in float32", f"end higher, one by {figure(highest)}"
    yield "Hidden states in float32", f"loss first is 3.3: {onsets} million tokens with float32"


def times_of_chosen_kernels() -> Iterator[tuple[float, float]]:
    """For each cell, the time of the recorded choice and of today's choice, over the fastest time."""
    for group in read_record("attention_cpu/auto/auto.json")["groups"]:
        seconds = {row["kernel"]: row["seconds"]["both"]["median"] for row in group["rows"]
                   if row["reason"] is None}  # fmt: skip
        fastest = min(seconds.values())
        mechanism = group["title"].partition(",")[0]
        today = "sdpa" if mechanism in ("plain", "log-n") else "blockwise"
        yield seconds[group["auto"]["chosen"]] / fastest, seconds[today] / fastest

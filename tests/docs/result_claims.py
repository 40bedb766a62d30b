"""Figures in the summaries of results and in their sections, computed from the records."""

import statistics
from collections.abc import Iterator
from typing import Any

from tests.docs.page_tables import ARCHITECTURES, SPEED
from tests.docs.records import Lengths, Study, by_key, column, figure, read_record
from tests.docs.speed_tables import times_by_kernel

Claim = tuple[str, str, str]
"""Page, heading, and a part of a sentence with its figures."""

IN_SHORT = (ARCHITECTURES, "In short")
README = ("README.md", "Results")
SPEED_IN_SHORT = (SPEED, "Speed and memory")
EQUAL_TUNING = (ARCHITECTURES, "Equal tuning at 1.3M parameters")
ONE_MILLION = (ARCHITECTURES, "1.3M parameters")
GAIN = (ARCHITECTURES, "The gain on queries and keys")
NORM = (ARCHITECTURES, "The norm of attention's average")
BRIDGE = (ARCHITECTURES, "A bridge from nGPT")
ABLATION = (ARCHITECTURES, "From GPT+ to anGPT")


def leading(text: str) -> str:
    """`1.30` of `1.30 (1.25 … 1.34)`."""
    return text.partition(" ")[0]


def times(text: str) -> str:
    """`1.30 times (1.25 … 1.34)` of `1.30 (1.25 … 1.34)`."""
    return text.replace(" (", " times (", 1)


def interval(text: str) -> str:
    """`1.25 … 1.34` of `1.30 (1.25 … 1.34)`."""
    return text.partition("(")[2].rstrip(")")


def opened(text: str, comparison: str = "") -> str:
    """`0.111 behind (0.078 … 0.144` of `0.111 (0.078 … 0.144)`, with the bracket left open."""
    return text.removesuffix(")").replace(" (", f" {comparison}(", 1)


def level(text: str) -> str:
    """`0.007, −0.211 … 0.225` of `0.007 (−0.211 … 0.225)`."""
    return text.replace(" (", ", ").rstrip(")")


def corrected(arm: str, baseline: str, *records: str) -> list[float]:
    """Return the arm's sorted corrected p of every comparison with this baseline."""
    p_values = []
    for record in records:
        for comparison in read_record(f"{record}/report.json")["comparisons"]:
            if comparison["baseline"] == baseline:
                groups = by_key(comparison["groups"], "label")
                if arm in groups:
                    p_values.append(groups[arm]["p_holm"])
    return sorted(p_values)


def mean_speed_up(study: Study, arm: str, baseline: str) -> str:
    return figure(study.speed_up(arm, baseline).mean)


def claims() -> Iterator[Claim]:
    yield from claims_on_short_training()
    yield from claims_on_equal_tuning()
    yield from claims_on_the_gain()
    yield from claims_on_the_norm()
    yield from claims_on_scale_invariant_attention()
    yield from claims_on_a_bridge()
    yield from claims_on_fewer_tokens()
    yield from claims_on_small_models()
    yield from claims_on_cpus()
    yield from claims_on_gpus()


def claims_on_short_training() -> Iterator[Claim]:
    demo = Study("convergence/demo")
    cpu = Study("convergence/cpu")
    ngpt = times(demo.faster("nGPT", "GPT+"))
    angpt = times(demo.faster("anGPT", "GPT+"))
    yield *IN_SHORT, f"nGPT is ahead after short training | 1.3M, 0.6 | 3 | {ngpt}"
    yield *IN_SHORT, f"anGPT is ahead after short training | 1.3M, 0.6 | 3 | {angpt}"

    ngpt = mean_speed_up(cpu, "nGPT", "GPT+")
    angpt = mean_speed_up(cpu, "anGPT", "GPT+")
    yield *README, f"need {ngpt} and {angpt} times fewer tokens than an equally tuned"
    without_ngpt = mean_speed_up(cpu, "nGPT, no QK-norm", "GPT+, no QK-norm")
    without_angpt = mean_speed_up(cpu, "anGPT, no QK-norm", "GPT+, no QK-norm")
    yield (
        ARCHITECTURES,
        "Convergence",
        f"nGPT needs {ngpt} times fewer tokens than GPT+ and anGPT {angpt}, "
        f"without QK-norm {without_ngpt} and {without_angpt}.",
    )

    ngpt = mean_speed_up(demo, "nGPT", "GPT+")
    angpt = mean_speed_up(demo, "anGPT", "GPT+")
    yield *README, f"at those of the demo {ngpt} and {angpt}"
    invariant = mean_speed_up(demo, "anGPT, scale-invariant", "GPT+")
    yield (
        ARCHITECTURES,
        "The demo",
        f"nGPT needs {ngpt} times fewer tokens than GPT+, anGPT {angpt}, "
        f"anGPT with scale-invariant attention {invariant}.",
    )


def claims_on_equal_tuning() -> Iterator[Claim]:
    study = Study("bridge/plain-1.3m")
    lag = study.minus("anGPT", "GPT+")
    p = figure(study.p("anGPT", "GPT+"))
    behind_gpt = opened(lag, "behind GPT+ ")
    yield *IN_SHORT, f"never there: {opened(lag, 'behind ')}, p = {p})"
    yield *README, f"anGPT ends {behind_gpt}, p = {p}, three seeds)"
    yield *EQUAL_TUNING, f"anGPT ends {behind_gpt} nats per token, p = {p}, three seeds)"

    untuned = Study("compute_optimal/1.3m")
    ngpt = untuned.faster("nGPT", "GPT+")
    mean = mean_speed_up(untuned, "nGPT", "GPT+")
    yield *IN_SHORT, f"{ngpt}, not significant"
    yield *README, f"needs {mean} times fewer tokens than GPT+ ({interval(ngpt)}, two seeds)"
    lower = figure(-untuned.test("nGPT", "GPT+").difference)
    yield *ONE_MILLION, f"nGPT ends {lower} below GPT+"
    earlier = Study("compute_optimal/1.3m-first").faster("nGPT", "GPT+")
    yield *ONE_MILLION, f"There nGPT needs {times(earlier)} fewer tokens"


def claims_on_the_gain() -> Iterator[Claim]:
    study = Study("bridge/plain-1.3m")
    bounded = "GPT+, no gain on q and k"
    gain = "anGPT, gain on q and k"
    with_gain = study.minus(gain, "GPT+")
    without = study.minus("anGPT", bounded)
    p_with = figure(study.p(gain, "GPT+"))
    p_without = figure(study.p("anGPT", bounded))
    yield (
        *IN_SHORT,
        f"{opened(with_gain, 'behind ')}) and {without}, p = {p_with} and {p_without} before any "
        "correction",
    )
    yield *README, f"where both have it, {opened(with_gain)}, two seeds)"
    lowered = figure(-study.test(gain, "anGPT").difference)
    yield *GAIN, f"{lowered} lower ({interval(study.minus(gain, 'anGPT'))})"
    yield *GAIN, f"GPT+ ends {opened(study.minus(bounded, 'GPT+'), 'higher ')})"
    yield *GAIN, f"Where both have it anGPT is {opened(with_gain, 'behind ')})"


def claims_on_the_norm() -> Iterator[Claim]:
    study = Study("bridge/plain-1.3m")
    normed = "GPT+, norm of each head's average"
    both = "anGPT, gain, unit norm of each head's average"
    lowered = study.lower(both, "anGPT")
    p = figure(corrected(both, "anGPT", "bridge/plain-1.3m")[0])
    fewer = times(study.faster(both, "anGPT"))
    yield *IN_SHORT, f"lower anGPT's loss by {leading(lowered)} |"
    yield *IN_SHORT, f"{fewer} fewer tokens than anGPT"
    yield *README, f"ends {opened(lowered, 'lower ')}, three seeds)"
    yield *NORM, f"lower anGPT's loss by {opened(lowered)}, p = {p} after"
    yield *NORM, f"{fewer} fewer tokens"

    gap = level(study.minus(both, "GPT+"))
    behind = study.minus(both, normed)
    p = figure(study.p(both, normed))
    behind_normed = opened(behind, "behind a GPT+ with that norm ")
    yield *IN_SHORT, f"level with GPT+ ({gap}), {behind_normed}, p = {p})"
    yield *NORM, f"With both, anGPT ends level with GPT+ ({gap})"
    yield *NORM, f"Against that GPT+ anGPT is {opened(behind, 'behind ')}, p = {p})"
    yield *README, f"it is {opened(behind, 'behind ')})"

    onset = Study("bridge/onset")
    alone = "anGPT, unit norm of each head's average"
    lowered = opened(onset.lower(alone, "anGPT"))
    p = figure(onset.p(alone, "anGPT"))
    yield *NORM, f"lowers anGPT's loss by {lowered}, p = {p}, six seeds;"
    yield *NORM, f"{times(onset.faster(alone, 'anGPT'))} fewer tokens"


def claims_on_scale_invariant_attention() -> Iterator[Claim]:
    tiny = Study("compute_optimal/0.1m")
    small = Study("compute_optimal/0.4m-attention")
    gpt = mean_speed_up(tiny, "GPT+, scale-invariant", "GPT+")
    ngpt = mean_speed_up(tiny, "nGPT, scale-invariant", "nGPT")
    angpt = times(tiny.faster("anGPT, scale-invariant", "anGPT"))
    yield *IN_SHORT, f"GPT+ {gpt}, nGPT {ngpt}, anGPT {angpt}"

    heading = (ARCHITECTURES, "Scale-invariant attention")
    lowered = opened(small.lower("anGPT, scale-invariant", "anGPT"))
    p = figure(small.p("anGPT, scale-invariant", "anGPT"))
    fewer = times(small.faster("anGPT, scale-invariant", "anGPT"))
    yield *heading, f"anGPT's loss by {lowered}, p = {p}). That is {fewer} fewer tokens"
    gpt = figure(-small.test("GPT+, scale-invariant", "GPT+").difference)
    ngpt = figure(-small.test("nGPT, scale-invariant", "nGPT").difference)
    yield *heading, f"GPT+'s and nGPT's by {gpt} and {ngpt}"


def claims_on_a_bridge() -> Iterator[Claim]:
    bridge = Study("bridge")
    both = "anGPT, s_qk, SiLU of deviation 1"
    yield *IN_SHORT, f"{times(bridge.faster(both, 'anGPT'))} fewer tokens than anGPT"
    lowered = opened(bridge.lower(both, "anGPT"))
    p = figure(corrected(both, "anGPT", "bridge")[0])
    yield *BRIDGE, f"lower anGPT's final loss by {lowered} nats per token, p = {p} after"

    plain = Study("bridge/plain")
    lag = plain.minus("anGPT", "GPT+")
    fresh = plain.minus("anGPT", "GPT+", seeds=(4, 5, 6))
    p = figure(plain.p("anGPT", "GPT+"))
    p_values = corrected("anGPT", "GPT+", "bridge/plain", "bridge/onset")
    p_values += corrected("GPT+", "anGPT", "bridge/plain", "bridge/onset")
    holm = f"Holm {figure(min(p_values))} to {figure(max(p_values))}"
    yield *IN_SHORT, f"{opened(lag, 'behind ')}, p = {p}, {holm} by comparison)"
    yield *IN_SHORT, f"on the other three {fresh}"
    yield (
        *README,
        f"anGPT is {opened(lag, 'behind a GPT+ with a long warm-up ')}, six seeds); on the three "
        f"on which that was not picked {interval(fresh)}",
    )
    yield *BRIDGE, f"anGPT ends {opened(lag, 'behind GPT+ ')}, p = {p}, {holm} by"
    behind_ngpt = opened(plain.minus("anGPT", "nGPT"), "behind nGPT ")
    yield *BRIDGE, f"anGPT ends {behind_ngpt}, p = {figure(plain.p('anGPT', 'nGPT'))}"
    yield *BRIDGE, f"anGPT is {opened(fresh, 'behind ')})"
    gap = level(plain.minus("nGPT", "GPT+"))
    yield *BRIDGE, f"Between nGPT and GPT+ no difference is shown ({gap})"


def claims_on_fewer_tokens() -> Iterator[Claim]:
    shortest = Study("compute_optimal/0.4m-0.6")
    two = Study("compute_optimal/0.4m-2")
    six = Study("compute_optimal/0.4m-6")
    yield *IN_SHORT, f"nGPT {two.faster('nGPT', 'GPT+')}, anGPT {two.faster('anGPT', 'GPT+')}"
    yield *IN_SHORT, f"nGPT {six.faster('nGPT', 'GPT+')} at 6;"
    ngpt = []
    for study in (shortest, two, six):
        ngpt.append(mean_speed_up(study, "nGPT", "GPT+"))
    angpt = mean_speed_up(shortest, "anGPT", "GPT+")
    angpt_at_two = mean_speed_up(two, "anGPT", "GPT+")
    assert six.speed_up("anGPT", "GPT+").mean is None
    yield (
        *README,
        f"at 0.6, 2 and 6 it is {ngpt[0]}, {ngpt[1]} and {ngpt[2]} for nGPT, "
        f"{angpt}, {angpt_at_two} and none for anGPT",
    )


def claims_on_small_models() -> Iterator[Claim]:
    tiny = Study("compute_optimal/0.1m")
    p = figure(tiny.p_holm("anGPT", "GPT+", ("nGPT", "anGPT")))
    yield *IN_SHORT, f"anGPT's significantly (p = {p})"
    depth = Study("depth")
    gaps = []
    for layers in (2, 4, 8):
        shape = f"layers {layers}, width 64"
        test = depth.test(f"anGPT, {shape}", f"GPT+, {shape}")
        gaps.append(figure(test.difference))
    yield *IN_SHORT, f"{', '.join(gaps)} nats behind"
    ablation = Study("ablation-cpu")
    gap = ablation.minus("anGPT", "nGPT (strict norms)").replace(" (", " nats, ").rstrip(")")
    yield *ABLATION, f"anGPT is below nGPT is not shown ({gap})"
    worse = ablation.minus("anGPT without ν(α)", "anGPT")
    yield *ABLATION, f"only worse by {worse}"


def claims_on_cpus() -> Iterator[Claim]:
    speed = {}
    for target in read_record("step_cpu/xeon/step-cpu.json")["targets"]:
        speed[target["what"]] = leading(target["measured"])
    litgpt = speed["eager: GPT+'s speed beside litgpt's GPT"]
    qwen3 = speed["eager: GPT+'s speed beside transformers' Qwen3"]
    peers = f"GPT+ is {litgpt} and {qwen3} times as fast as litgpt and Qwen3"
    yield *README, f"{peers} on a Xeon"
    yield *SPEED_IN_SHORT, peers
    angpt = speed["eager: time of anGPT beside GPT+"]
    ngpt = speed["eager: time of nGPT beside GPT+"]
    yield *SPEED_IN_SHORT, f"anGPT takes {angpt} and nGPT {ngpt} times GPT+'s time"

    ratios_by_model = {}
    for model in ("gpt", "ngpt", "angpt"):
        rounds = read_record(f"fit_cpu/{model}.json")["rounds"]
        ratios_by_model[model] = column(rounds, "ratio")
    medians = list(map(statistics.median, ratios_by_model.values()))
    span = f"{min(medians):.2f} to {max(medians):.2f}"
    yield *SPEED_IN_SHORT, f"its step takes {span} times as long as a bare step"
    _, *others = sorted(ratios_by_model["angpt"])
    without_smallest = f"without it the ratios are {others[0]:.3f} to {others[-1]:.3f}"
    yield SPEED, "A run beside its bare steps", without_smallest

    step = second_row("shared_keys_cpu/step-cpu.json")["beside"]["train"]["median"]
    token = second_row("shared_keys_cpu/decoding.json")["beside"]["step"]["median"]
    ratios = (
        f"take {figure(step)} times a training step, a quarter of the cache and "
        f"{figure(token)} times a generated token"
    )
    yield *README, ratios
    yield SPEED, "Shared keys", ratios
    step_and_token = (
        f"{figure(step)} times a training step, a quarter of the cache, "
        f"{figure(token)} times a generated token"
    )
    yield *SPEED_IN_SHORT, step_and_token

    costs = []
    for shape in read_record("attention_cpu/threads_1/attention.json")["shapes"]:
        if not shape["shape"]["documents"]:
            seconds = times_by_kernel(shape)
            costs.append(seconds["scale-invariant", "blockwise"] / seconds["plain", "sdpa"])
    cost = f"costs {figure(min(costs))} to {figure(max(costs))} times"
    yield *README, f"{cost} plain attention on one thread"
    yield SPEED, "Attention", f"{cost} plain attention"
    yield *SPEED_IN_SHORT, f"{cost} plain attention"

    loss = by_key(read_record("loss_memory/loss.json")["rows"], "way")
    share = figure(100 * loss["anlit"]["part_of_full"])
    yield *SPEED_IN_SHORT, f"{share} % of the memory of full logits"
    ratio = total_step_seconds("bfloat16") / total_step_seconds("float32")
    yield *SPEED_IN_SHORT, f"a step takes {figure(ratio)} times as long as in float32"

    lengths = Lengths("attention/0.4m/lengths")
    added = leading(lengths.row("scale-invariant")[2])
    yield *README, f"loses most, {added} nats, at 16 times it"


def total_step_seconds(dtype: str) -> float:
    """Return the sum over models, modes and two measurements of a step's median seconds."""
    seconds = 0.0
    for turn in (1, 2):
        group = read_record(f"step_cpu/bfloat16/{dtype}-{turn}.json")["groups"][0]
        for row in group["rows"]:
            seconds += row["seconds"]["train"]["median"]
    return seconds


def second_row(name: str) -> Any:
    return read_record(name)["groups"][0]["rows"][1]


def claims_on_gpus() -> Iterator[Claim]:
    record = read_record("gpu/step.json")
    shares = []
    seconds = {}
    for row in record["groups"][0]["rows"]:
        if row["reason"] is None:
            seconds[leading(row["label"])] = row["seconds"]["train"]["median"]
        if row["reason"] is None and row["model"] != "litgpt":
            flops_per_second = row["flops"]["train"] / seconds[leading(row["label"])]
            shares.append(100 * flops_per_second / record["peak_flops_per_second"])
    peak = f"{figure(min(shares))} to {figure(max(shares))} %"
    times = f"{seconds['GPT+'] / seconds['litgpt']:.2f}"
    yield *README, f"at {peak} of its measured peak, GPT+ in {times} times litgpt's time"

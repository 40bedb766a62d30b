"""Sentences of the pages of results, with the figures that the records beside them give."""

from collections.abc import Iterator

from tests.docs.page_tables import ARCHITECTURES, SPEED
from tests.docs.records import Lengths, Study, figure, read_record

RESULTS_README = "README.md"
Claim = tuple[str, str, str]
"""Page, heading, and words with their figures."""

IN_SHORT = (ARCHITECTURES, "In short")
RESULTS_IN_SHORT = (RESULTS_README, "Results")


def times(words: str) -> str:
    """`1.30 times (1.25 … 1.34)` of `1.30 (1.25 … 1.34)`."""
    return words.replace(" (", " times (", 1)


def interval(words: str) -> str:
    """`1.25 … 1.34` of `1.30 (1.25 … 1.34)`."""
    return words.partition("(")[2].rstrip(")")


def opened(words: str, by: str = "") -> str:
    """`0.111 behind (0.078 … 0.144` of `0.111 (0.078 … 0.144)`, for more words in the brackets."""
    return words.removesuffix(")").replace(" (", f" {by}(", 1)


def corrected(arm: str, baseline: str, *records: str) -> list[float]:
    """The arm's corrected p in every comparison of the records with this baseline."""
    return sorted(
        group["p_holm"]
        for record in records
        for comparison in read_record(f"{record}/report.json")["comparisons"]
        if comparison["baseline"] == baseline
        for group in comparison["groups"]
        if group["label"] == arm
    )


def claims() -> Iterator[Claim]:
    yield from claims_on_short_training()
    yield from claims_on_equal_tuning()
    yield from claims_on_the_gain_and_the_norm()
    yield from claims_on_scale_invariant_attention()
    yield from claims_on_small_models()
    yield from claims_on_speed()


def claims_on_short_training() -> Iterator[Claim]:
    demo, cpu = Study("convergence/demo"), Study("convergence/cpu")
    ngpt, angpt = (demo.faster(arm, "GPT+") for arm in ("nGPT", "anGPT"))
    yield *IN_SHORT, f"nGPT is ahead after short training | 1.3M, 0.6 | 3 | {times(ngpt)}"
    yield *IN_SHORT, f"anGPT is ahead after short training | 1.3M, 0.6 | 3 | {times(angpt)}"
    tuned = [figure(cpu.speed_up(arm, "GPT+").mean) for arm in ("nGPT", "anGPT")]
    plain = [figure(demo.speed_up(arm, "GPT+").mean) for arm in ("nGPT", "anGPT")]
    yield (
        *RESULTS_IN_SHORT,
        f"need {tuned[0]} and {tuned[1]} times fewer tokens than an equally tuned",
    )
    yield *RESULTS_IN_SHORT, f"at those of the demo {plain[0]} and {plain[1]}"
    without = [
        figure(cpu.speed_up(f"{arm}, no QK-norm", "GPT+, no QK-norm").mean)
        for arm in ("nGPT", "anGPT")
    ]
    yield (
        ARCHITECTURES,
        "Convergence",
        f"nGPT needs {tuned[0]} times fewer tokens than GPT+ and anGPT {tuned[1]}, "
        f"without QK-norm {without[0]} and {without[1]}.",
    )
    invariant = figure(demo.speed_up("anGPT, scale-invariant", "GPT+").mean)
    yield (
        ARCHITECTURES,
        "The demo",
        f"nGPT needs {plain[0]} times fewer tokens than GPT+, anGPT {plain[1]}, "
        f"anGPT with scale-invariant attention {invariant}.",
    )


def claims_on_equal_tuning() -> Iterator[Claim]:
    study, untuned = Study("bridge/plain-1.3m"), Study("compute_optimal/1.3m")
    lag = study.minus("anGPT", "GPT+")
    p = figure(study.p("anGPT", "GPT+"))
    yield *IN_SHORT, f"never there: {opened(lag, 'behind ')}, p = {p})"
    yield *RESULTS_IN_SHORT, f"anGPT ends {opened(lag, 'behind GPT+ ')}, p = {p}, three seeds)"
    yield (
        ARCHITECTURES,
        "Equal tuning at 1.3M parameters",
        f"anGPT ends {opened(lag, 'behind GPT+ ')} nats per token, p = {p}, three seeds)",
    )
    ngpt = untuned.faster("nGPT", "GPT+")
    yield *IN_SHORT, f"{ngpt}, not significant"
    short = figure(untuned.speed_up("nGPT", "GPT+").mean)
    yield (
        *RESULTS_IN_SHORT,
        f"needs {short} times fewer tokens than GPT+ ({interval(ngpt)}, two seeds)",
    )
    lower = figure(-untuned.test("nGPT", "GPT+").difference)
    yield ARCHITECTURES, "1.3M parameters", f"nGPT ends {lower} below GPT+"
    earlier = Study("compute_optimal/1.3m-first").faster("nGPT", "GPT+")
    yield ARCHITECTURES, "1.3M parameters", f"nGPT {times(earlier)}"


def claims_on_the_gain_and_the_norm() -> Iterator[Claim]:
    study = Study("bridge/plain-1.3m")
    bounded, gain = "GPT+, no gain on q and k", "anGPT, gain on q and k"
    normed, both = (
        "GPT+, norm of each head's average",
        "anGPT, gain, unit norm of each head's average",
    )
    heading = (ARCHITECTURES, "The gain on queries and keys")
    with_gain = study.minus(gain, "GPT+")
    without = study.minus("anGPT", bounded)
    p = figure(study.p(gain, "GPT+")), figure(study.p("anGPT", bounded))
    yield (
        *IN_SHORT,
        f"{opened(with_gain, 'behind ')}) and {without}, p = {p[0]} and {p[1]} before any correction",
    )
    yield *RESULTS_IN_SHORT, f"where both have it, {opened(with_gain)}, two seeds)"
    effect = study.minus(gain, "anGPT")
    yield *heading, f"{figure(-study.test(gain, 'anGPT').difference)} lower ({interval(effect)})"
    yield *heading, f"GPT+ ends {opened(study.minus(bounded, 'GPT+'), 'higher ')})"
    yield *heading, f"Where both have it anGPT is {opened(with_gain, 'behind ')})"
    heading = (ARCHITECTURES, "The norm of attention's average")
    lowered = study.lower(both, "anGPT")
    p_norm = figure(corrected(both, "anGPT", "bridge/plain-1.3m")[0])
    fewer = times(study.faster(both, "anGPT"))
    yield *IN_SHORT, f"lower anGPT's loss by {lowered.partition(' ')[0]} |"
    yield *IN_SHORT, f"{fewer} fewer tokens than anGPT"
    yield *RESULTS_IN_SHORT, f"ends {opened(lowered, 'lower ')}, three seeds)"
    yield *heading, f"lower anGPT's loss by {opened(lowered)}, p = {p_norm} after"
    yield *heading, f"{fewer} fewer tokens"
    level = study.minus(both, "GPT+").replace(" (", ", ").rstrip(")")
    behind = study.minus(both, normed)
    p_behind = figure(study.p(both, normed))
    yield (
        *IN_SHORT,
        f"level with GPT+ ({level}), {opened(behind, 'behind a GPT+ with that norm ')}, p = {p_behind})",
    )
    yield *heading, f"It ends level with GPT+ ({level})"
    yield *heading, f"there anGPT is {opened(behind, 'behind ')}, p = {p_behind})"
    yield *RESULTS_IN_SHORT, f"it is {opened(behind, 'behind ')})"
    onset = Study("bridge/onset")
    alone = "anGPT, unit norm of each head's average"
    lowered = onset.lower(alone, "anGPT")
    p_alone = figure(onset.p(alone, "anGPT"))
    yield *heading, f"lowers anGPT's loss by {opened(lowered)}, p = {p_alone}, six seeds;"
    yield *heading, f"{times(onset.faster(alone, 'anGPT'))} fewer tokens"


def claims_on_scale_invariant_attention() -> Iterator[Claim]:
    tiny, small = Study("compute_optimal/0.1m"), Study("compute_optimal/0.4m-attention")
    gains = [figure(tiny.speed_up(f"{arm}, scale-invariant", arm).mean) for arm in ("GPT+", "nGPT")]
    angpt = [times(study.faster("anGPT, scale-invariant", "anGPT")) for study in (tiny, small)]
    yield *IN_SHORT, f"GPT+ {gains[0]}, nGPT {gains[1]}, anGPT {angpt[0]}"
    heading = (ARCHITECTURES, "Scale-invariant attention")
    lowered = small.lower("anGPT, scale-invariant", "anGPT")
    p = figure(small.p("anGPT, scale-invariant", "anGPT"))
    yield *heading, f"loss by {opened(lowered)}, p = {p}), {angpt[1]} fewer tokens"
    others = [
        figure(-small.test(f"{arm}, scale-invariant", arm).difference) for arm in ("GPT+", "nGPT")
    ]
    yield *heading, f"GPT+'s and nGPT's by {others[0]} and {others[1]}"
    bridge = Study("bridge")
    both = "anGPT, s_qk, SiLU of deviation 1"
    yield *IN_SHORT, f"{times(bridge.faster(both, 'anGPT'))} fewer tokens than anGPT"
    p = figure(corrected(both, "anGPT", "bridge")[0])
    yield (
        ARCHITECTURES,
        "A bridge from nGPT",
        f"lower anGPT's final loss by {opened(bridge.lower(both, 'anGPT'))} nats per token, p = {p} "
        "after",
    )


def claims_on_small_models() -> Iterator[Claim]:
    plain = Study("bridge/plain")
    lag = plain.minus("anGPT", "GPT+")
    fresh = plain.minus("anGPT", "GPT+", seeds=(4, 5, 6))
    p = figure(plain.p("anGPT", "GPT+"))
    holm = corrected("anGPT", "GPT+", "bridge/plain", "bridge/onset")
    holm += corrected("GPT+", "anGPT", "bridge/plain", "bridge/onset")
    from_to = f"Holm {figure(min(holm))} to {figure(max(holm))}"
    yield *IN_SHORT, f"{opened(lag, 'behind ')}, p = {p}, {from_to} by comparison)"
    yield *IN_SHORT, f"on the other three {fresh}"
    yield (
        *RESULTS_IN_SHORT,
        f"it is {opened(lag, 'behind a GPT+ with a long warm-up ')}, six seeds; on the three on which "
        f"that was not picked {interval(fresh)})",
    )
    heading = (ARCHITECTURES, "A bridge from nGPT")
    yield *heading, f"anGPT ends {opened(lag, 'behind GPT+ ')}, p = {p}, {from_to} by"
    ngpt = plain.minus("anGPT", "nGPT")
    yield *heading, f"and {opened(ngpt, 'behind nGPT ')}, p = {figure(plain.p('anGPT', 'nGPT'))}"
    yield *heading, f"anGPT is {opened(fresh, 'behind ')})"
    level = plain.minus("nGPT", "GPT+").replace(" (", ", ").rstrip(")")
    yield *heading, f"between nGPT and GPT+ no difference is shown ({level})"
    lengths = {name: Study(f"compute_optimal/0.4m-{name}") for name in ("0.6", "2", "6")}
    two, six = lengths["2"], lengths["6"]
    ngpt, angpt = (two.faster(arm, "GPT+") for arm in ("nGPT", "anGPT"))
    yield *IN_SHORT, f"nGPT {ngpt}, anGPT {angpt}"
    yield *IN_SHORT, f"nGPT {six.faster('nGPT', 'GPT+')} at 6;"
    ngpt_speeds = [figure(study.speed_up("nGPT", "GPT+").mean) for study in lengths.values()]
    angpt_speeds = [figure(study.speed_up("anGPT", "GPT+").mean) for study in (lengths["0.6"], two)]
    assert six.speed_up("anGPT", "GPT+").mean is None
    yield (
        *RESULTS_IN_SHORT,
        f"at 0.6, 2 and 6 it is {', '.join(ngpt_speeds[:2])} and {ngpt_speeds[2]} for nGPT, "
        f"{', '.join(angpt_speeds)} and none for anGPT",
    )
    tiny = Study("compute_optimal/0.1m")
    yield (
        *IN_SHORT,
        f"anGPT's significantly (p = {figure(tiny.p_holm('anGPT', 'GPT+', ('nGPT', 'anGPT')))})",
    )
    depth = Study("depth")
    gaps = [
        figure(
            depth.test(
                f"anGPT, layers {layers}, width 64", f"GPT+, layers {layers}, width 64"
            ).difference
        )
        for layers in (2, 4, 8)
    ]
    yield *IN_SHORT, f"{', '.join(gaps)} nats behind"
    ablation = Study("ablation-cpu")
    lower = ablation.minus("anGPT", "nGPT (strict norms)").replace(" (", " nats, ").rstrip(")")
    yield ARCHITECTURES, "From GPT+ to anGPT", f"anGPT is below nGPT is not shown ({lower})"
    worse = ablation.minus("anGPT without ν(α)", "anGPT")
    yield ARCHITECTURES, "From GPT+ to anGPT", f"only worse by {worse}"


def claims_on_speed() -> Iterator[Claim]:
    peers = {
        target["what"]: target["measured"].split(" ")[0]
        for target in read_record("step_cpu/xeon/step-cpu.json")["targets"]
    }
    litgpt = peers["eager: GPT+'s speed beside litgpt's GPT"]
    qwen3 = peers["eager: GPT+'s speed beside transformers' Qwen3"]
    yield (
        *RESULTS_IN_SHORT,
        f"GPT+ is {litgpt} and {qwen3} times as fast as litgpt and Qwen3 on a Xeon",
    )
    step = read_record("shared_keys_cpu/step-cpu.json")["groups"][0]["rows"][1]
    token = read_record("shared_keys_cpu/decoding.json")["groups"][0]["rows"][1]
    ratios = step["beside"]["train"]["median"], token["beside"]["step"]["median"]
    yield (
        *RESULTS_IN_SHORT,
        f"take {figure(ratios[0])} times a training step, a quarter of the cache and "
        f"{figure(ratios[1])} times a generated token",
    )
    costs = []
    for shape in read_record("attention_cpu/threads_1/attention.json")["shapes"]:
        times_by_kernel = {
            (row["mechanism"], row["kernel"]): row["both"]["median"] for row in shape["entrants"]
        }
        if shape["shape"]["documents"]:
            continue
        invariant = times_by_kernel["scale-invariant", "blockwise"]
        costs.append(invariant / times_by_kernel["plain", "sdpa"])
    cost = f"costs {figure(min(costs))} to {figure(max(costs))} times plain attention on one thread"
    yield *RESULTS_IN_SHORT, cost
    yield SPEED, "Attention", f"costs {figure(min(costs))} to {figure(max(costs))} times what plain"
    beyond = Lengths("attention/0.4m/lengths").row("scale-invariant")[2].partition(" ")[0]
    yield *RESULTS_IN_SHORT, f"loses most, {beyond} nats, at 16 times it"
    record = read_record("gpu/step.json")
    shares, seconds = {}, {}
    for row in record["groups"][0]["rows"]:
        if row["reason"] is None and row["label"].endswith("sdpa compiled"):
            median = row["seconds"]["train"]["median"]
            seconds[row["label"].split(" ")[0]] = median
            shares[row["label"]] = (
                100 * row["flops"]["train"] / median / record["peak_flops_per_second"]
            )
    peak = f"{figure(min(shares.values()))} to {figure(max(shares.values()))} %"
    less = f"{figure(100 * (1 - seconds['anGPT'] / seconds['GPT+']))} %"
    yield (
        *RESULTS_IN_SHORT,
        f"at {peak} of its measured peak, anGPT in {less} less time than GPT+",
    )

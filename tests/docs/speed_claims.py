"""Figures in sentences of speed.md."""

from collections.abc import Iterator, Sequence

from tests.docs.page_tables import SPEED
from tests.docs.records import (
    Study,
    by_key,
    column,
    figure,
    read_record,
)
from tests.docs.result_claims import leading, total_step_seconds
from tests.docs.section_claims import from_to, section
from tests.docs.speed_tables import hidden_states, megabytes, quartiles, times_by_kernel


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
    gpt, ngpt, angpt = map(leading, map(half.mean, ("GPT+", "nGPT", "anGPT")))
    yield f"at {gpt}, {ngpt} and {angpt} in bfloat16"
    ratio = total_step_seconds("bfloat16") / total_step_seconds("float32")
    yield f"a step of a small model takes {figure(ratio)} times"
    rows = read_record("step_cpu/bfloat16/backends.json")["groups"][0]["rows"]
    times = column(column(rows, "seconds"), "train")
    eager, sdpa, blockwise = map(quartiles, times)
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
    rows = by_key(read_record("loss_memory/loss.json")["rows"], "way")
    yield f"the loss takes {megabytes(rows['anlit'])} MB"
    yield f"Full logits take {megabytes(rows['full'])} MB"


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
    gaps = map(float, angpt_row[3].replace("−", "-").split(", "))
    yield f"end higher, one by {figure(max(gaps))}"
    yield f"onset is at {', '.join(onsets)} million tokens with float32"

"""The table and sentences of english.md, computed from the study's record."""

from collections.abc import Iterator
from operator import itemgetter

from anlit.compare.statistics import holm
from tests.docs.page_tables import ENGLISH, Rows, table
from tests.docs.records import Study, read_record
from tests.docs.section_claims import section

BASELINES = {
    "GPT+": None,
    "GPT+, norm of each head's average": "GPT+",
    "nGPT": "GPT+",
    "nGPT, unit norm of each head's average": "nGPT",
    "anGPT": "GPT+",
    "anGPT, gain, unit norm of each head's average": "anGPT",
    "anGPT, scale-invariant": "anGPT",
}
"""Arm → the arm that it is compared with."""


@table(ENGLISH, "English prose")
def final_losses() -> Rows:
    study = Study("english")
    rows = []
    for arm, baseline in BASELINES.items():
        gap = "" if baseline is None else f"{study.minus(arm, baseline)} {baseline}"
        rows.append([arm, ", ".join(study.seeds(arm)), study.mean(arm), gap])
    return rows


@section(ENGLISH, "English prose")
def speed_ups() -> Iterator[str]:
    study = Study("english")
    arm = "anGPT, scale-invariant"
    faster = study.faster(arm, "anGPT").replace(" (", " times fewer tokens than anGPT (")
    p = study.p(arm, "anGPT")
    yield f"{faster.rstrip(')')}, p = {p:.3f})"
    against_gpt = study.faster(arm, "GPT+").replace(" (", " times (")
    yield f"Against GPT+ it is {against_gpt}"
    spans = []
    for name in BASELINES:
        losses = study.losses(name).values()
        spans.append(max(losses) - min(losses))
    yield f"seeds differ by up to {max(spans):.1f} nats"
    p_values = []
    for name, baseline in BASELINES.items():
        if baseline is not None:
            p_values.append(study.p(name, baseline))
    corrected = holm(p_values)[-1]
    assert corrected is not None
    yield f"With Holm's correction over the six, p = {p:.3f} becomes {corrected:.2f}"
    last_values = sorted(read_record("english/copies.json").values(), key=itemgetter("val/loss"))
    savings = list(map(saved_by_a_copy, last_values))
    lowest = savings[:4]
    assert min(lowest) > max(savings[4:])
    yield f"runs that end lowest save {min(lowest):.2f} to {max(lowest):.2f} nats per token"
    seconds = 0.0
    for curves in study.curves.values():
        for curve in curves.values():
            seconds += curve.seconds[-1]
    yield f"{seconds / 3600:.2f} hours of training in all"


def saved_by_a_copy(run: dict[str, float]) -> float:
    return run["copying/first"] - run["copying/second"]

"""Figures in sentences of attention.md and nu_att.md."""

import math
from collections.abc import Iterator

import numpy as np

from tests.docs.page_tables import ATTENTION
from tests.docs.records import (
    Lengths,
    column,
    figure,
    read_record,
)
from tests.docs.result_claims import leading
from tests.docs.section_claims import section
from tests.docs.speed_tables import needles


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

    alibi = "ALiBi"
    invariant = "scale-invariant, p-RoPE"
    accuracies = {}
    others = set()
    for label, *_, accuracy in needles():
        accuracies[label] = leading(accuracy)
        if label not in (alibi, invariant):
            others.add(float(leading(accuracy)))
    yield (
        f"At 16 times it ALiBi finds {accuracies[alibi]} and scale-invariant attention "
        f"{accuracies[invariant]}, only needles at the end of the text; the others find none"
    )
    assert others == {0.0}
    for points in read_record("attention/0.4m/needle/needle.json")["measurements"]:
        *earlier, end = points[-1]["by_depth"]
        assert end["depth"] == 1.0
        assert not any(column(earlier, "matches"))


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

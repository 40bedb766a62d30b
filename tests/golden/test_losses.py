"""All losses of 20 training steps of the three architectures, against stored numbers.

Tolerances are 1e-10 in float64 and 2e-5 in float32, on all processors with AVX2 or AVX512. Initial
weights are drawn in float32. Other processors round them differently: there the tolerance is 1e-4.
Only if an issue says that numbers change may they be written anew:

    python -m tests.golden.test_losses
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from anlit import GPT, NGPT, ALiBi, AnGPT, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.io.provenance import processor_name
from anlit.nn.mechanisms.mechanism import Mechanism
from tests.nn.models.tiny import Logged, adamw, batches, fit, tiny

RECORD = Path(__file__).with_name("losses.json")
STEPS = 20

ARCHITECTURES = {"GPT": GPT, "NGPT": NGPT, "AnGPT": AnGPT}
WEIGHT_DECAYS = {"GPT": 0.1, "NGPT": 0.0, "AnGPT": 0.0}
"""As in configs/model."""
SETTINGS: dict[str, dict[str, Any]] = {"GPT": {}, "NGPT": {}, "AnGPT": {"alpha_init": 1 / 2}}
"""The stored losses of anGPT are of an α of 1/n_layers."""


class Case(NamedTuple):
    """A run; its name in the record has its four fields."""

    architecture: str
    mechanism: str
    kernel: str
    precision: str

    @property
    def name(self) -> str:
        return " ".join(self)


MECHANISMS: dict[str, Mechanism] = {
    "plain": Plain(),
    "scale-invariant": ScaleInvariant(tau=3.0),
    "alibi": ALiBi(),
    "log n": LogN(),
    "grouped": ScaleInvariant(tau=3.0, learned="per_head"),
    "window": SlidingWindow(40, ScaleInvariant(tau=3.0)),
    "dense": ScaleInvariant(tau=3.0),
    "dense alibi": ALiBi(),
}
CHANGES: dict[str, dict[str, Any]] = {
    "grouped": {"n_kv_heads": 1},
    "dense": {"document_masking": False},
    "dense alibi": {"document_masking": False},
}
"""Settings besides the mechanism."""

KERNELS_OF_ALL = {"plain": ("eager", "sdpa"), "scale-invariant": ("eager", "blockwise")}
"""Kernels by mechanism, for all architectures and precisions. SDPA cannot scale logits by
distance."""

KERNELS_OF_ANGPT = {
    "alibi": ("sdpa", "blockwise"),
    "log n": ("sdpa",),
    "grouped": ("blockwise",),
    "window": ("eager", "blockwise"),
    "dense": ("blockwise",),
    "dense alibi": ("sdpa",),
}
"""Cases of anGPT in float64 alone, on sequences of several blocks of blockwise."""

TOLERANCES = {"64-true": 1e-10, "32-true": 2e-5}
"""The bounds of each loss's error. Processors and sets of instructions differ by up to 6e-15 and
2e-6."""


def list_cases() -> list[Case]:
    cases = []
    for architecture, mechanism in itertools.product(ARCHITECTURES, KERNELS_OF_ALL):
        for kernel in KERNELS_OF_ALL[mechanism]:
            for precision in TOLERANCES:
                cases.append(Case(architecture, mechanism, kernel, precision))
    for mechanism, kernels in KERNELS_OF_ANGPT.items():
        for kernel in kernels:
            cases.append(Case("AnGPT", mechanism, kernel, "64-true"))
    return cases


CASES = list_cases()


def losses(case: Case) -> list[float]:
    """The loss before each step, in nats per token, on ten passes over two batches of documents.

    Clipping, z-loss and the schedule are on.
    """
    length = 160 if case.mechanism in KERNELS_OF_ANGPT else 32
    model = tiny(
        ARCHITECTURES[case.architecture],
        optimizer=adamw(lr=0.01, weight_decay=WEIGHT_DECAYS[case.architecture]),
        attention=MECHANISMS[case.mechanism],
        kernel=case.kernel,
        z_loss=1e-3,
        context_length=length,
        **SETTINGS[case.architecture],
        **CHANGES.get(case.mechanism, {}),
    )
    logged = Logged("train/loss")
    loader = batches(8, length)
    fit(model, STEPS, loader=loader, precision=case.precision, callbacks=[logged])
    return logged.values["train/loss"]


def machine() -> dict[str, str]:
    """The machine that stores numbers. It decides the last digits of float32."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor_name(), "capability": capability, "torch": torch.__version__}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_are_the_stored_losses(case: Case) -> None:
    stored = json.loads(RECORD.read_text())["losses"][case.name]
    draws_alike = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    tolerance = TOLERANCES[case.precision] if draws_alike else 1e-4

    actual = losses(case)

    assert len(actual) == STEPS
    assert actual[-1] < actual[0] - 0.1
    assert actual == pytest.approx(stored, rel=tolerance, abs=0)


def test_every_stored_run_is_compared() -> None:
    stored = json.loads(RECORD.read_text())["losses"]

    assert stored.keys() == {case.name for case in CASES}


def write() -> None:
    """Store this machine's losses."""
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        run = losses(case)
        assert all(map(math.isfinite, run))
        rows.append(f"  {json.dumps(case.name)}: {json.dumps(run)}")
    runs = ",\n".join(rows)
    RECORD.write_text(f'{{"machine": {json.dumps(machine())},\n"losses": {{\n{runs}\n}}}}\n')


if __name__ == "__main__":
    write()

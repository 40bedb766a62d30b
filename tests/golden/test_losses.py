"""Every loss of 20 training steps of the three architectures, against numbers that were stored with them.

In float64 to 1e-10, in float32 to 2e-5, on every processor with AVX2 or AVX512. Others round the initial weights, which
are drawn in float32, differently: there to 1e-4. Only where an issue says that numbers change may they be written anew:

    python -m tests.golden.test_losses
"""

import json
import math
from pathlib import Path

import pytest
import torch

from anlit import GPT, NGPT, ALiBi, AnGPT, LogN, Plain, ScaleInvariant, SlidingWindow
from anlit.io.provenance import processor_name
from tests.nn.models.tiny import Logged, adamw, batches, fit, tiny

RECORD = Path(__file__).with_name("losses.json")
STEPS = 20
ARCHITECTURES = {"GPT": (GPT, 0.1), "NGPT": (NGPT, 0.0), "AnGPT": (AnGPT, 0.0)}
"""With the weight decay of configs/model."""
MECHANISMS = {
    "plain": (Plain(), ("eager", "sdpa")),
    "scale-invariant": (
        ScaleInvariant(tau=3.0),
        ("eager", "blockwise"),
    ),  # SDPA cannot scale logits by distance
}
OTHERS = {
    "alibi": (ALiBi(), ("sdpa", "blockwise"), {}), "log n": (LogN(), ("sdpa",), {}),
    "grouped": (ScaleInvariant(tau=3.0, learned="per_head"), ("blockwise",), {"n_kv_heads": 1}),
    "window": (SlidingWindow(40, ScaleInvariant(tau=3.0)), ("eager", "blockwise"), {}),
    "dense": (ScaleInvariant(tau=3.0), ("blockwise",), {"document_masking": False}),
    "dense alibi": (ALiBi(), ("sdpa",), {"document_masking": False}),
}  # fmt: skip
"""Of anGPT in float64 alone, on sequences of more than one block of blockwise."""
TOLERANCES = {"64-true": 1e-10, "32-true": 2e-5}
"""Of each loss. Between processors and sets of instructions the largest errors are 6e-15 and 2e-6."""
CASES = [
    (architecture, mechanism, kernel, precision) for architecture in ARCHITECTURES
    for mechanism, (_, kernels) in MECHANISMS.items() for kernel in kernels for precision in TOLERANCES
]  # fmt: skip
CASES += [
    ("AnGPT", name, kernel, "64-true")
    for name, (_, kernels, _) in OTHERS.items()
    for kernel in kernels
]


def losses(architecture: str, mechanism: str, kernel: str, precision: str) -> list[float]:
    """The loss before each step, in nats per token, on ten passes over two batches of packed documents.

    Clipping, z-loss and the schedule are on.
    """
    build, weight_decay = ARCHITECTURES[architecture]
    attention, _, more = OTHERS.get(mechanism) or (*MECHANISMS[mechanism], {})
    length, logged = 160 if mechanism in OTHERS else 32, Logged("train/loss")
    model = tiny(build, optimizer=adamw(lr=0.01, weight_decay=weight_decay), attention=attention, kernel=kernel,
                 z_loss=1e-3, context_length=length, **more)  # fmt: skip
    fit(model, STEPS, loader=batches(8, length), precision=precision, callbacks=[logged])
    return logged.values["train/loss"]


def machine() -> dict[str, str]:
    """Where numbers were stored; it decides the last digits of float32, with much that has no name."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"processor": processor_name(), "capability": capability, "torch": torch.__version__}


@pytest.mark.parametrize(("architecture", "mechanism", "kernel", "precision"), CASES)
def test_losses_are_the_stored_ones(architecture, mechanism, kernel, precision) -> None:
    runs = json.loads(RECORD.read_text())["losses"]
    stored = runs[" ".join((architecture, mechanism, kernel, precision))]
    now = losses(architecture, mechanism, kernel, precision)
    assert len(now) == STEPS
    assert now[-1] < now[0] - 0.1
    draws_alike = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    tolerance = TOLERANCES[precision] if draws_alike else 1e-4
    error = max(abs(a / b - 1) for a, b in zip(now, stored, strict=True))
    assert error <= tolerance, f"a loss is off by {error:.1e} of its value"


def test_every_stored_run_is_compared() -> None:
    assert json.loads(RECORD.read_text())["losses"].keys() == {" ".join(case) for case in CASES}


def write() -> None:
    """Store this machine's losses."""
    torch.set_num_threads(1)
    runs = {" ".join(case): losses(*case) for case in CASES}
    assert all(math.isfinite(loss) for run in runs.values() for loss in run)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    RECORD.write_text(f'{{"machine": {json.dumps(machine())},\n"losses": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    write()

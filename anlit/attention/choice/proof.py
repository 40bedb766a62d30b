"""Whether a back end is right: its output and gradients against those of eager attention in a higher precision."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from anlit.attention.backends import eager
from anlit.attention.choice.inputs import Inputs

BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-11}
"""‖x − reference‖/‖reference‖ at most, of the output and of each gradient."""
LEARNED_BOUNDS = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-10}
"""The same of what is learned: a sum over all pairs, of which most cancels."""
SMALLEST = 1e-3
"""Of ‖gradient of the output‖: a reference below it counts as this large. Over 65,536 keys those of q and k are about
4 times this."""
NOTHING = 1e-9
"""Of ‖gradient of v‖: a reference below it is 0, as are those of q and k where every query sees one key. A perfect
kernel has the difference of two rounded numbers there, so the error is relative to the gradient of v."""


def reference(given: Inputs) -> tuple[Tensor, ...]:
    """The eager back end with the same numbers in float32, or in float64 for what itself is float32 or more."""
    narrow = given.q.dtype in (torch.bfloat16, torch.float16)
    return given.wider(torch.float32 if narrow else torch.float64).both(eager.attend)


def errors(found: Sequence[Tensor], expected: Sequence[Tensor], probe: Tensor) -> dict[str, float]:
    """The relative error of the output, of the gradients of q, k, v, and of what is learned; inf where not finite.

    Args:
        found, expected: As `Inputs.both` returns them.
        probe: The gradient of the output.
    """
    names = ["out", "q", "k", "v", *(f"learned {n}" for n in range(len(found) - 4))]
    least = SMALLEST * probe.norm(dtype=expected[0].dtype)
    of_v = expected[names.index("v")].norm()
    norms = [other.norm() for other in expected]
    sizes = [torch.where(norm > NOTHING * of_v, torch.maximum(norm, least), of_v) for norm in norms]
    triples = zip(found, expected, sizes, strict=True)
    values = [((one.to(other.dtype) - other).norm() / size).item() for one, other, size in triples]
    return {name: value if math.isfinite(value) else math.inf for name, value in zip(names, values, strict=True)}


def wrong(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """What is over its bound; None if nothing is."""
    bounds = {name: (LEARNED_BOUNDS if name.startswith("learned") else BOUNDS)[dtype] for name in found}
    over = {name: error for name, error in found.items() if not error <= bounds[name]}
    return f"it is wrong: relative error {max(over.values()):.1e} of {', '.join(over)}" if over else None

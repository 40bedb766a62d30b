"""The check of kernels against float64 passes what is right and names what is wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import ALiBi, LogBias, Plain, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.benchmarks.attention import judge_table
from anlit.benchmarks.attention_check import (
    BLOCK,
    LEARNED_BOUNDS,
    MOST_BLOCKS,
    Inputs,
    random_documents,
    relative_errors,
    size_of_parts,
    wrong,
)
from anlit.nn.kernels import KERNELS, eager
from anlit.nn.mechanisms.mechanism import Mechanism

CPU = torch.device("cpu")


def an_input(
    mechanism: Mechanism,
    length: int = 48,
    document: int | None = None,
    key_heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    layer = mechanism.for_layer(2, 16, 0)
    documents = random_documents(2, length, document, CPU)
    return Inputs(layer, documents, 2, 2, key_heads, 16, dtype)


@pytest.mark.parametrize("document", [None, 16], ids=["dense", "documents"])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(
    "mechanism",
    [Plain(), ScaleInvariant(learned="globally"), SlidingWindow(8, ALiBi())],
    ids=["plain", "scale-invariant", "window"],
)
def test_the_kernels_of_a_cpu_are_right(mechanism, key_heads, document) -> None:
    inputs = an_input(mechanism, document=document, key_heads=key_heads)
    for name in ("sdpa", "blockwise", "eager"):
        if KERNELS[name].unsupported_reason(inputs.mechanism) is None:
            errors = relative_errors(inputs, KERNELS[name].attend)
            assert wrong(errors, torch.float32) is None, name


@pytest.mark.parametrize("document", [None, 16], ids=["dense", "documents"])
@pytest.mark.parametrize(("row", "token"), [(0, 0), (0, -1), (1, 5)])
def test_a_fault_in_any_number_of_a_long_first_row_or_in_another_row_is_seen(
    row: int, token: int, document: int | None
) -> None:
    length = BLOCK * (MOST_BLOCKS + 2)
    inputs = an_input(ScaleInvariant(learned="per_layer"), length, document)

    def shifted(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return eager.attend(q, k, v, *rest) + 0.1 * v[row, :, token].sum()

    assert "v" in str(wrong(relative_errors(inputs, shifted), torch.float32))


def test_a_learned_number_is_judged_by_what_its_gradient_sums_and_not_by_what_is_left() -> None:
    """The parts of two queries, 3 and −3 + 1e−6: what is left of them is no measure of their rounding."""
    parts = torch.tensor([3.0, -3.0 + 1e-6], dtype=torch.float64)
    probe = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    (size,) = size_of_parts(lambda signed: [(signed[0, 0, :, 0] * parts).sum()], probe)
    assert 2.0 < size < 6.0


@pytest.mark.parametrize("mechanism", [
    ScaleInvariant(learned="per_layer"), ScaleInvariant(learned="per_head"),
    LogBias(g=SqrtLogN(learned="globally"))], ids=["per layer", "per head", "globally"])  # fmt: skip
def test_a_wrong_gradient_of_what_is_learned_is_seen(mechanism: Mechanism) -> None:
    inputs = an_input(mechanism, length=96)
    assert wrong(relative_errors(inputs, eager.attend), torch.float32) is None

    def without_late_queries(*arguments: Any) -> Tensor:
        """The right output, with the part of the last queries missing in the learned gradient."""
        output = eager.attend(*arguments)
        with_frozen = eager.attend(*arguments[:3], Frozen(arguments[3]), *arguments[4:])
        is_late = torch.arange(output.shape[-2])[:, None] >= 48
        return torch.where(is_late, with_frozen, output)

    errors = relative_errors(inputs, without_late_queries)
    assert errors["out"] < 1e-6
    assert errors["learned 0"] > 10 * LEARNED_BOUNDS[torch.bfloat16]
    assert "learned 0" in str(wrong(errors, torch.bfloat16))


class Frozen(Mechanism):
    """A layer's mechanism, with no gradient of what it learns."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.functions = (mechanism,)  # not a submodule
        self.window = mechanism.window

    def gain(self, n: Tensor) -> Tensor | None:
        return detached(self.functions[0].gain(n))

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return detached(self.functions[0].distance_gain(t))

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return detached(self.functions[0].distance_bias(t))


def detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def a_row(mechanism: str, kernel: str, auto: str, ms: float | None) -> dict[str, Any]:
    row = {"mechanism": mechanism, "kernel": kernel, "auto": auto, "reason": None}
    if ms is None:
        return {**row, "reason": "it is wrong"}
    return {**row, "seconds": {"both": {"median": ms / 1e3}}}


def test_the_benchmark_says_where_auto_takes_the_fastest_and_how_to_take_another() -> None:
    group = {
        "title": "D 64, T 4096",
        "rows": [
            a_row("plain", "sdpa", "sdpa", 2.5),
            a_row("plain", "flex", "sdpa", 3.9),
            a_row("alibi", "triton", "triton", 6.0),
            a_row("alibi", "flex", "triton", 5.0),
            a_row("scale-invariant", "triton", "triton", None),
            a_row("scale-invariant", "eager", "triton", 50.0),
        ],
    }
    summary, lines = judge_table([group])
    assert "fastest kernel of those timed in 1 of 3 cases" in summary
    assert "--model.kernel NAME" in summary
    assert lines.splitlines() == [
        "- D 64, T 4096, plain: auto takes sdpa, the fastest of 2",
        "- D 64, T 4096, alibi: auto takes triton, 6 ms; flex takes 5 ms",
        "- D 64, T 4096, scale-invariant: auto takes triton, which was not timed; eager takes 50 ms",
    ]
    assert judge_table([{"title": "nothing timed", "rows": group["rows"][4:5]}]) == []

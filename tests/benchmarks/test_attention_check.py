"""The check of kernels against float64 passes right kernels and names faults."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anlit import ALiBi, LogBias, Plain, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.benchmarks import attention_check
from anlit.benchmarks.attention_check import (
    BLOCK,
    LEARNED_BOUNDS,
    Inputs,
    fault_of,
    random_documents,
    relative_errors,
    size_of_terms,
)
from anlit.nn.kernels import KERNELS, eager
from anlit.nn.mechanisms.mechanism import Mechanism

CPU = torch.device("cpu")


def make_inputs(
    mechanism: Mechanism,
    length: int = 48,
    mean_document: int | None = None,
    key_heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    layer = mechanism.for_layer(2, 16, 0)
    documents = random_documents(2, length, mean_document, CPU)
    return Inputs(layer, documents, 2, 2, key_heads, 16, dtype)


dense_or_documents = pytest.mark.parametrize(
    "mean_document",
    [
        pytest.param(None, id="dense"),
        pytest.param(16, id="documents"),
    ],
)


@pytest.mark.covering(2)
@dense_or_documents
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(Plain(), id="plain"),
        pytest.param(ScaleInvariant(learned="globally"), id="scale-invariant"),
        pytest.param(SlidingWindow(8, ALiBi()), id="window"),
    ],
)
def test_the_kernels_of_a_cpu_are_right(mechanism, key_heads, mean_document) -> None:
    inputs = make_inputs(mechanism, mean_document=mean_document, key_heads=key_heads)

    for name in ("sdpa", "blockwise", "eager"):
        kernel = KERNELS[name]
        if kernel.unsupported_reason(inputs.mechanism) is None:
            errors = relative_errors(inputs, kernel.attend)
            assert fault_of(errors, torch.float32) is None, name


@dense_or_documents
@pytest.mark.parametrize(
    ("row", "token"),
    [
        pytest.param(0, 0, id="the first token"),
        pytest.param(0, -1, id="the last token"),
        pytest.param(1, 5, id="another row"),
    ],
)
def test_a_fault_anywhere_in_a_long_first_row_or_in_another_row_is_seen(
    row: int, token: int, mean_document: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_check, "MAX_BLOCKS", 3)  # of 5
    length = BLOCK * 5
    mechanism = ScaleInvariant(learned="per_layer")
    inputs = make_inputs(mechanism, length, mean_document)

    def shifted(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
        shift = 0.1 * v[row, :, token].sum()
        return eager.attend(q, k, v, *arguments) + shift

    errors = relative_errors(inputs, shifted)

    fault = fault_of(errors, torch.float32)
    assert "v" in str(fault)


def test_the_error_of_a_learned_number_is_relative_to_the_terms_of_its_gradient() -> None:
    """Two queries add 3 and −3 + 1e−6. The rounding error does not scale with their sum, 1e−6."""
    terms = torch.tensor([3.0, -3.0 + 1e-6], dtype=torch.float64)
    probe = torch.ones(1, 1, 2, 1, dtype=torch.float64)

    def gradients_of(signed_probe: Tensor) -> list[Tensor]:
        signs = signed_probe.flatten()
        return [(signs * terms).sum()]

    (size,) = size_of_terms(gradients_of, probe)

    assert 2.0 < size < 6.0


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(ScaleInvariant(learned="per_layer"), id="per layer"),
        pytest.param(ScaleInvariant(learned="per_head"), id="per head"),
        pytest.param(LogBias(g=SqrtLogN(learned="globally")), id="globally"),
    ],
)
def test_a_wrong_gradient_of_a_learned_number_is_seen(mechanism: Mechanism) -> None:
    inputs = make_inputs(mechanism, length=96)
    right_errors = relative_errors(inputs, eager.attend)
    assert fault_of(right_errors, torch.float32) is None

    def without_late_queries(*arguments: Any) -> Tensor:
        """Return the right output; the last queries add nothing to the learned gradient."""
        q, k, v, layer, *settings = arguments
        output = eager.attend(*arguments)
        frozen_output = eager.attend(q, k, v, Frozen(layer), *settings)
        output[..., 48:, :] = frozen_output[..., 48:, :]
        return output

    errors = relative_errors(inputs, without_late_queries)

    assert errors["out"] < 1e-6
    bound = LEARNED_BOUNDS[torch.bfloat16]
    assert errors["learned 0"] > 10 * bound
    fault = fault_of(errors, torch.bfloat16)
    assert "learned 0" in str(fault)


class Frozen(Mechanism):
    """A layer's mechanism without gradients of its learned numbers."""

    def __init__(self, mechanism: Mechanism) -> None:
        super().__init__()
        self.mechanisms = (mechanism,)  # in a tuple it is not a submodule
        self.window = mechanism.window

    def gain(self, n: Tensor) -> Tensor | None:
        return detached(self.mechanisms[0].gain(n))

    def distance_gain(self, t: Tensor) -> Tensor | None:
        return detached(self.mechanisms[0].distance_gain(t))

    def distance_bias(self, t: Tensor) -> Tensor | None:
        return detached(self.mechanisms[0].distance_bias(t))


def detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()

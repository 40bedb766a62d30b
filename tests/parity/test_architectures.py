"""All architectures and mechanisms against the formulas in `naive.py`: logits and all gradients.

All kernels that can compute the mechanism agree to 1e-9 in float64. SDPA also agrees in float32, to
its rounding.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch

from anlit import GPT, NGPT, AnGPT, DynamicNTK, NoPE, PositionsPattern, PRoPE, RoPE
from anlit.nn import mechanisms
from anlit.nn.kernels import sdpa
from anlit.nn.layers.positions import Positions
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.warm_start import grow, warm_starts
from anlit.nn.models.angpt import Approximation
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.fold import fold
from anlit.training.language_model import LanguageModel
from tests.nn.attention.examples import SHIPPED, LogNWithSlopes
from tests.nn.models.tiny import (
    ARCHITECTURES,
    SIZE,
    has_setting,
    is_normalised,
    jolt,
    random_tokens,
    tiny,
)
from tests.parity import formulas, naive

ORACLE = {GPT: naive.gpt, NGPT: naive.ngpt, AnGPT: naive.angpt}

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
TOKENS = random_tokens(*DOCUMENTS.shape)
SEEDED = torch.Generator().manual_seed(2)
PROBE = torch.randn(*TOKENS.shape, SIZE["vocab_size"], generator=SEEDED).double()
"""Random weights of the logits in the sum that is differentiated."""

POSITIONS: dict[str, Positions] = {
    "rope half": RoPE(fraction=0.5),
    "rope whole": RoPE(fraction=1.0),
    "p-rope": PRoPE(),
    "nope": NoPE(),
    "dynamic ntk": DynamicNTK(fraction=0.5, training_length=4),
    "pattern": PositionsPattern([RoPE(fraction=0.5), NoPE()]),
}


def frequencies_of_layers(positions: str, d_head: int) -> list[list[float]]:
    """The radians per token of each rotated pair, in each layer of the period."""
    if positions == "rope half":
        return [naive.rope(d_head, 0.5)]
    if positions == "rope whole":
        return [naive.rope(d_head, 1.0)]
    if positions == "p-rope":
        return [naive.p_rope(d_head)]
    if positions == "dynamic ntk":
        stretch = DOCUMENTS.shape[1] / 4
        return [naive.dynamic_ntk(d_head, 0.5, stretch)]
    if positions == "pattern":
        return [naive.rope(d_head, 0.5), []]
    assert positions == "nope"
    return [[]]


MECHANISMS: dict[str, Mechanism] = {**SHIPPED, "a user's": LogNWithSlopes()}

FORMULAS: dict[str, naive.Logit] = {
    "plain": formulas.plain,
    "scale-invariant": formulas.scale_invariant(3.0),
    "scale-invariant, c per layer": formulas.scale_invariant(3.0, learned=True),
    "log n": formulas.log_n(),
    "log n, fixed": formulas.log_n(s=0.7),
    "log n, shifted": formulas.log_n(b=0.3, c=1.5),
    "sqrt log n": formulas.sqrt_log_n(a=0.2, r=1.5),
    "sqrt log n, r global": formulas.sqrt_log_n(shared=True),
    "sqrt log n, r per layer": formulas.sqrt_log_n(b=0.5, c=1.0),
    "sqrt log n, r per head": formulas.sqrt_log_n(),
    "expected maximum": formulas.expected_maximum,
    "log bias": formulas.log_bias(2.0),
    "log bias, r global": formulas.log_bias(2.0, formulas.sqrt_log_n(shared=True)),
    "warm start, scale-invariant": formulas.warm_start(3 / 8, formulas.scale_invariant(2.0)),
    "warm start, log n": formulas.warm_start(3 / 8, formulas.log_n(s=0.4)),
    "a user's": formulas.log_n_with_slopes,
}
"""Mechanisms with the same formula in all layers."""

WINDOWS: dict[str, tuple[naive.Logit, int]] = {
    "window": (formulas.plain, 3),
    "window, scale-invariant": (formulas.scale_invariant(2.0), 4),
    "window, log n": (formulas.log_n(), 3),
}
"""Mechanisms with a window, and its width."""

DEPEND_ON_HEADS: dict[str, Callable[[int, int], list[tuple[naive.Logit, int | None]]]] = {
    "beta": lambda n_heads, d_head: [(formulas.beta(d_head), None)],
    "alibi": lambda n_heads, d_head: [(formulas.alibi(n_heads), None)],
    "pattern": lambda n_heads, d_head: [
        (formulas.alibi(n_heads), 2),
        (formulas.sqrt_log_n(), None),
    ],
}
"""Formula and window of each layer of the period, made for a number of heads and their width."""

ALPHA = (0.3, 0.07)
"""Initial value and scale of α."""

S_Z = (3.0, 0.2)
"""Initial value and scale of s_z."""

EPS = 1e-2

ROUNDING = 2e-5
"""Bound of the errors of float32: three times the largest. Half precision has 100 times as much."""

Result = dict[str, torch.Tensor]

architectures = pytest.mark.parametrize("architecture", ORACLE)


class Case(NamedTuple):
    """A model under test."""

    architecture: type[LanguageModel]
    mechanism: str  # of MECHANISMS
    positions: str  # of POSITIONS
    changes: dict[str, Any]  # settings of the model and of its formulas


def build(case: Case, kernel: str) -> Decoder:
    settings = {
        "attention": MECHANISMS[case.mechanism],
        "positions": POSITIONS[case.positions],
        "kernel": kernel,
        **case.changes,
    }
    if has_setting(case.architecture, "norm_eps"):
        settings["norm_eps"] = EPS
    if is_normalised(case.architecture):
        settings["alpha_init"], settings["alpha_scale"] = ALPHA
        settings["s_z_init"], settings["s_z_scale"] = S_Z
    model = tiny(case.architecture, **settings).double()
    decoder = jolt(model).model
    grow(warm_starts(decoder), 3)  # of the 8 steps of a warm start
    return decoder


def gradients_of(module: Decoder) -> Result:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def computed(model: Decoder) -> Result:
    """Logits, and the gradients of their probed sum by the embedded input and all parameters."""
    outputs = []
    model.embedding.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    logits = model(TOKENS, DOCUMENTS)
    (embedded,) = outputs
    embedded.retain_grad()
    probed_sum = (logits * PROBE.to(logits)).sum()
    probed_sum.backward()
    return {
        "logits": logits.detach(),
        "embedded input": embedded.grad,
        **gradients_of(model),
    }


def layers_of(mechanism: str, positions: str, n_heads: int, d_head: int) -> list[naive.Layer]:
    if mechanism in DEPEND_ON_HEADS:
        period = DEPEND_ON_HEADS[mechanism](n_heads, d_head)
    elif mechanism in WINDOWS:
        period = [WINDOWS[mechanism]]
    else:
        period = [(FORMULAS[mechanism], None)]
    period_of_positions = frequencies_of_layers(positions, d_head)
    layers = []
    for layer in range(SIZE["n_layers"]):
        logit, window = period[layer % len(period)]
        frequencies = period_of_positions[layer % len(period_of_positions)]
        layers.append(naive.Layer(logit, frequencies, window))
    return layers


def naive_settings(case: Case) -> naive.Settings:
    values = {**SIZE, "norm_eps": EPS, "alpha": ALPHA, "s_z": S_Z, **case.changes}
    n_heads = values["n_heads"]
    d_head = values.setdefault("d_head", values["d_model"] // n_heads)
    values.setdefault("d_ff", 4 * values["d_model"])
    values.setdefault("n_kv_heads", n_heads)
    approximation = values.get("approximation", Approximation())
    values |= vars(approximation)
    values["gated"] = values.get("attention_gate", "none") != "none"
    values["layers"] = layers_of(case.mechanism, case.positions, n_heads, d_head)
    names = {field.name for field in fields(naive.Settings)}
    return naive.Settings(**{name: values[name] for name in names & values.keys()})


def by_the_formulas(model: Decoder, case: Case) -> Result:
    """The result of `computed` from `naive.py`, with the model's parameters."""
    settings = naive_settings(case)
    oracle = ORACLE[case.architecture]
    ids = DOCUMENTS if case.changes["document_masking"] else None
    copies = {}
    for name, parameter in model.named_parameters():
        copies[name] = parameter.detach().clone().requires_grad_()
    # A tied head has no name of its own.
    parameters = {"head.weight": copies["embedding.weight"], **copies}
    logits, embedded = naive.run(oracle, parameters, TOKENS, ids, settings)
    probed_sum = (logits * PROBE).sum()
    probed_sum.backward()
    for name, parameter in copies.items():
        assert parameter.grad is not None, f"the formulas do not use {name}"
        assert parameter.grad.abs().max() > 1e-6, f"{name} is not put to the test"
    result = {"logits": logits.detach(), "embedded input": embedded.grad}
    for name, parameter in copies.items():
        result[name] = parameter.grad
    return result


def compare(actual: Result, expected: Result, tolerance: float, label: str) -> None:
    """Compare tensors to `tolerance` of their largest entry.

    The terms of a number or two may cancel: there the tolerance is 20 times as large.
    """
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        limit = 20 * tolerance if tensor.numel() < 3 else tolerance
        difference = actual[name].double() - tensor
        largest_entry = tensor.abs().max()
        assert difference.abs().max() <= limit * largest_entry, f"{label}: {name}"


def check(
    architecture: type[LanguageModel],
    mechanism: str = "plain",
    positions: str = "rope half",
    masked: bool = True,
    **changes: Any,
) -> None:
    """Compare all kernels that can compute the mechanism with `naive.py`.

    `changes` are settings of both.
    """
    changes = {"qk_norm": True, "document_masking": masked, **changes}
    case = Case(architecture, mechanism, positions, changes)
    eager = build(case, "eager")
    expected = by_the_formulas(eager, case)

    compare(computed(eager), expected, 1e-9, "eager, float64")
    if architecture is not GPT:
        folded_logits = {"logits": fold(eager)(TOKENS, DOCUMENTS)}
        expected_logits = {"logits": expected["logits"]}
        compare(folded_logits, expected_logits, 1e-9, "folded")
    blockwise = build(case, "blockwise")
    compare(computed(blockwise), expected, 1e-9, "blockwise, float64")
    if sdpa.unsupported_reason(MECHANISMS[mechanism]) is None:
        check_sdpa(case, expected)


def check_sdpa(case: Case, expected: Result) -> None:
    """SDPA computes documents in turn from a mean length on, and by a mask below."""
    mean_lengths = {1: "document by document"}
    if case.changes["document_masking"]:
        mean_lengths[100] = "by a mask"
    for shortest_mean, label in mean_lengths.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sdpa, "SHORTEST_MEAN", shortest_mean)
            model = build(case, "sdpa")
            compare(computed(model), expected, 1e-9, f"sdpa {label}, float64")
            single_precision = build(case, "sdpa").float()
            compare(computed(single_precision), expected, ROUNDING, f"sdpa {label}, float32")


masking = pytest.mark.parametrize("masked", [True, False], ids=["documents", "one text"])


@masking
@pytest.mark.parametrize("mechanism", MECHANISMS)
@architectures
@pytest.mark.covering(2)
def test_every_mechanism_matches_the_formulas(architecture, mechanism, masked) -> None:
    check(architecture, mechanism, masked=masked)


@masking
@pytest.mark.parametrize("positions", POSITIONS)
@architectures
@pytest.mark.covering(2)
def test_every_position_matches_the_formulas(architecture, positions, masked) -> None:
    check(architecture, "scale-invariant", positions, masked)


SHAPED_MECHANISMS = (
    "plain",
    "scale-invariant, c per layer",
    "log n",
    "sqrt log n, r global",
    "beta",
    "alibi",
    "window, log n",
    "a user's",
)
"""Mechanisms that differ in how they depend on heads."""


@pytest.mark.parametrize("d_head", [4, 8, 12])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mechanism", SHAPED_MECHANISMS)
@architectures
@pytest.mark.covering(2)
def test_every_shape_matches_the_formulas(architecture, mechanism, n_kv_heads, d_head) -> None:
    """Heads that share keys, and heads of any width: H·D is 0.5, 1 and 1.5 times d."""
    check(architecture, mechanism, n_kv_heads=n_kv_heads, d_head=d_head, n_heads=4)


SHARED_KEYS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 12}
NORMS = {"v_norm": True, "attention_norm": True}
ELEMENT_GATES = {"attention_gate": "per_element"}
WITHOUT_NU = Approximation(residual_factor=False)
WITHOUT_NU_AND_SMALL = Approximation(residual_factor=False, error=-0.02)
LARGE_FACTORS = Approximation(error=0.1)
SETTINGS: list[dict[str, Any]] = [
    {"qk_norm": False, "mechanism": "scale-invariant"},
    {"d_ff": 32},
    {"d_ff": 80},
    {"attention_gate": "per_head"},
    {"attention_gate": "per_head", "mechanism": "window, log n"},
    {**ELEMENT_GATES, "mechanism": "scale-invariant"},
    {"v_norm": True, "mechanism": "log n"},
    {"attention_norm": True, "mechanism": "log n"},
    {"post_norm": True, "mechanism": "log n"},
    {"qk_norm_eps": 0.7},
    {"qk_norm_eps": 0.7, "qk_norm": False},
    {"qk_norm_gain": False, **SHARED_KEYS},
    {**ELEMENT_GATES, **NORMS, **SHARED_KEYS},
    {**ELEMENT_GATES, **NORMS, **SHARED_KEYS, "qk_norm": False},
    {**ELEMENT_GATES, **NORMS, **SHARED_KEYS, "qk_norm_eps": 0.7, "n_kv_heads": 1},
    {
        **ELEMENT_GATES,
        **NORMS,
        "qk_norm_eps": 0.1,
        "qk_norm_gain": True,
        "post_norm": True,
        "mechanism": "pattern",
        "positions": "pattern",
    },
]
GPT_SETTINGS: list[dict[str, Any]] = [
    {"qk_norm_gain": False},
    {"tie_embeddings": True, "mechanism": "log n"},
]
NGPT_SETTINGS: list[dict[str, Any]] = [{"qk_norm_gain": False}]
ANGPT_SETTINGS: list[dict[str, Any]] = [
    {"qk_norm_gain": True},
    {"s_qk": True},
    {"s_qk": True, "qk_norm": False},
    {"silu_std": 1.0},
    {"silu_std": 1.0, "qk_norm": False},
    {"s_qk": True, "silu_std": 0.7, "n_kv_heads": 1},
    {"s_qk": True, "silu_std": 0.7, "n_kv_heads": 1, "qk_norm": False},
    {"approximation": WITHOUT_NU},
    {"approximation": WITHOUT_NU, "post_norm": True},
    {"approximation": WITHOUT_NU_AND_SMALL},
    {"approximation": WITHOUT_NU_AND_SMALL, "post_norm": True},
    {"approximation": LARGE_FACTORS},
    {"approximation": LARGE_FACTORS, "post_norm": True},
]


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@architectures
def test_every_setting_matches_the_formulas(architecture, changes) -> None:
    check(architecture, **changes)


@pytest.mark.parametrize("changes", GPT_SETTINGS, ids=str)
def test_every_setting_of_gpt_matches_the_formulas(changes) -> None:
    check(GPT, **changes)


@pytest.mark.parametrize("changes", NGPT_SETTINGS, ids=str)
def test_every_setting_of_ngpt_matches_the_formulas(changes) -> None:
    check(NGPT, **changes)


@pytest.mark.parametrize("changes", ANGPT_SETTINGS, ids=str)
def test_every_setting_of_angpt_matches_the_formulas(changes) -> None:
    check(AnGPT, **changes)


def test_every_shipped_mechanism_has_a_formula() -> None:
    shipped_classes = {getattr(mechanisms, name) for name in mechanisms.__all__}
    tested_classes = {type(mechanism) for mechanism in SHIPPED.values()}
    with_formula = FORMULAS.keys() | WINDOWS.keys() | DEPEND_ON_HEADS.keys()

    assert tested_classes == shipped_classes
    assert with_formula == MECHANISMS.keys()


def test_every_shipped_architecture_has_a_formula() -> None:
    assert ORACLE.keys() == {*ARCHITECTURES}

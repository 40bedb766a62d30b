"""Each architecture with each mechanism against the formulas written out in `naive.py`: logits and every gradient.

To 1e-9 in float64 on every kernel that can do the mechanism, and to float32 rounding for SDPA in float32.
"""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from anlit import GPT, NGPT, AnGPT, DynamicNTK, NoPE, PositionsPattern, PRoPE, RoPE
from anlit.nn import mechanisms
from anlit.nn.kernels import sdpa
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.warm_start import grow, warm_starts
from anlit.nn.models.angpt import Approximation
from anlit.nn.models.fold import fold
from tests.nn.attention.examples import SHIPPED, LogNWithSlopes
from tests.nn.models.tiny import SIZE, jolt, random_tokens, tiny
from tests.parity import formulas, naive

ORACLE = {GPT: naive.gpt, NGPT: naive.ngpt, AnGPT: naive.angpt}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
TOKENS = random_tokens(*DOCUMENTS.shape)
PROBE = torch.randn(
    *TOKENS.shape, SIZE["vocab_size"], generator=torch.Generator().manual_seed(2)
).double()
POSITIONS = {
    "rope half": (RoPE(fraction=0.5), lambda d_head: naive.rope(d_head, 0.5)),
    "rope whole": (RoPE(fraction=1.0), lambda d_head: naive.rope(d_head, 1.0)),
    "p-rope": (PRoPE(), naive.p_rope), "nope": (NoPE(), lambda d_head: []),
    "dynamic ntk": (DynamicNTK(fraction=0.5, training_length=4), lambda d_head: naive.dynamic_ntk(d_head, 0.5, 6 / 4)),
    "pattern": (PositionsPattern([RoPE(fraction=0.5), NoPE()]), lambda d_head: [naive.rope(d_head, 0.5), []]),
}  # fmt: skip
"""With the radians per token of each rotated pair at head width D."""
Formula = naive.Logit | list[tuple[naive.Logit, int | None]]
"""Of every layer, or of each layer of a pattern with its window."""
FORMULAS: dict[str, Formula | Callable[[int, int], Formula]] = {
    "plain": formulas.plain, "scale-invariant": formulas.scale_invariant(3.0),
    "scale-invariant, c per layer": formulas.scale_invariant(3.0, learned=True), "log n": formulas.log_n(),
    "log n, fixed": formulas.log_n(s=0.7), "log n, shifted": formulas.log_n(b=0.3, c=1.5),
    "sqrt log n": formulas.sqrt_log_n(a=0.2, r=1.5), "sqrt log n, r global": formulas.sqrt_log_n(shared=True),
    "sqrt log n, r per layer": formulas.sqrt_log_n(b=0.5, c=1.0), "sqrt log n, r per head": formulas.sqrt_log_n(),
    "expected maximum": formulas.expected_maximum, "beta": lambda n_heads, d_head: formulas.beta(d_head),
    "log bias": formulas.log_bias(2.0), "log bias, r global": formulas.log_bias(2.0, formulas.sqrt_log_n(shared=True)),
    "alibi": lambda n_heads, d_head: formulas.alibi(n_heads),
    "warm start, scale-invariant": formulas.warm_start(3 / 8, formulas.scale_invariant(2.0)),
    "warm start, log n": formulas.warm_start(3 / 8, formulas.log_n(s=0.4)), "window": [(formulas.plain, 3)],
    "window, scale-invariant": [(formulas.scale_invariant(2.0), 4)], "window, log n": [(formulas.log_n(), 3)],
    "pattern": lambda n_heads, d_head: [(formulas.alibi(n_heads), 2), (formulas.sqrt_log_n(), None)],
    "of one's own": formulas.log_n_with_slopes,
}  # fmt: skip
DEPEND_ON_HEADS = ("beta", "alibi", "pattern")
"""Their formulas are made for a number of heads and their width."""
MECHANISMS: dict[str, Mechanism] = {**SHIPPED, "of one's own": LogNWithSlopes()}
ALPHA, S_Z, EPS = (0.3, 0.07), (3.0, 0.2), 1e-2
Result = dict[str, torch.Tensor]
architectures = pytest.mark.parametrize("architecture", ORACLE)


def build(architecture, mechanism: str, positions: str, kernel: str, **changes) -> torch.nn.Module:
    changes |= {
        "attention": MECHANISMS[mechanism],
        "positions": POSITIONS[positions][0],
        "kernel": kernel,
    }
    if architecture is not NGPT:
        changes["norm_eps"] = EPS
    if architecture is not GPT:
        changes |= {
            "alpha_init": ALPHA[0],
            "alpha_scale": ALPHA[1],
            "s_z_init": S_Z[0],
            "s_z_scale": S_Z[1],
        }
    model = jolt(tiny(architecture, **changes).double()).model
    grow(warm_starts(model), 3)  # of the 8 steps of a warm start
    return model


def computed(model: torch.nn.Module) -> Result:
    """Logits, and the gradients of the embedded input and of every parameter, of the probed sum of the logits."""
    embedded = []
    model.embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    logits = model(TOKENS, DOCUMENTS)
    embedded[0].retain_grad()
    (logits * PROBE.to(logits)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "embedded input": embedded[0].grad, **gradients}


def layers_of(mechanism: str, positions: str, n_heads: int, d_head: int) -> list[naive.Layer]:
    formula, frequencies = FORMULAS[mechanism], POSITIONS[positions][1](d_head)
    if mechanism in DEPEND_ON_HEADS:
        formula = formula(n_heads, d_head)
    pattern = formula if isinstance(formula, list) else [(formula, None)]
    turning = frequencies if frequencies and isinstance(frequencies[0], list) else [frequencies]
    return [
        (logit, turning[layer % len(turning)], window)
        for layer in range(SIZE["n_layers"]) for logit, window in [pattern[layer % len(pattern)]]
    ]  # fmt: skip


def by_the_formulas(
    model: torch.nn.Module, architecture, mechanism, positions, changes: dict
) -> Result:
    """The same, with the model's parameters, from `naive.py`."""
    given = {**SIZE, "norm_eps": EPS, "alpha": ALPHA, "s_z": S_Z, **changes}
    d_head = given.setdefault("d_head", given["d_model"] // given["n_heads"])
    given |= vars(given.get("approximation", Approximation())) | {
        "gated": given.get("attention_gate", "none") != "none", "d_ff": given.get("d_ff", 4 * given["d_model"]),
        "n_kv_heads": given.get("n_kv_heads", given["n_heads"]),
        "layers": layers_of(mechanism, positions, given["n_heads"], d_head),
    }  # fmt: skip
    settings = naive.Settings(
        **{each.name: given[each.name] for each in fields(naive.Settings) if each.name in given}
    )
    ids = DOCUMENTS if changes["document_masking"] else None
    copies = {
        name: parameter.detach().clone().requires_grad_()
        for name, parameter in model.named_parameters()
    }
    parameters = {"head.weight": copies["embedding.weight"], **copies}  # where they are tied
    logits, embedded = naive.run(ORACLE[architecture], parameters, TOKENS, ids, settings)
    (logits * PROBE).sum().backward()
    for name, parameter in copies.items():
        assert parameter.grad is not None, f"the formulas do not use {name}"
        assert parameter.grad.abs().max() > 1e-6, f"{name} is not put to the test"
    gradients = {name: parameter.grad for name, parameter in copies.items()}
    return {"logits": logits.detach(), "embedded input": embedded.grad, **gradients}


def compare(actual: Result, expected: Result, tolerance: float, what: str) -> None:
    """Each tensor to `tolerance` of its largest entry; one or two numbers, whose terms may cancel, to 20 times that."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name].double() - tensor).abs().max() / tensor.abs().max()
        assert error <= tolerance * (20 if tensor.numel() < 3 else 1), f"{what}: {name}"


def check(
    architecture,
    mechanism: str = "plain",
    positions: str = "rope half",
    masked: bool = True,
    **changes,
) -> None:
    """Each kernel that can do the mechanism against `naive.py`; `changes` are settings of both."""
    changes = {"qk_norm": True, "document_masking": masked, **changes}
    eager = build(architecture, mechanism, positions, "eager", **changes)
    expected = by_the_formulas(eager, architecture, mechanism, positions, changes)
    compare(computed(eager), expected, 1e-9, "eager, float64")
    if architecture is not GPT:
        compare(
            {"logits": fold(eager)(TOKENS, DOCUMENTS)},
            {"logits": expected["logits"]},
            1e-9,
            "folded",
        )
    blockwise = build(architecture, mechanism, positions, "blockwise", **changes)
    compare(computed(blockwise), expected, 1e-9, "blockwise, float64")
    if sdpa.unsupported_reason(MECHANISMS[mechanism]) is not None:
        return
    for shortest, way in [(1, "document by document"), (100, "by a mask")][: 2 if masked else 1]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sdpa, "SHORTEST_MEAN", shortest)
            model = build(architecture, mechanism, positions, "sdpa", **changes)
            compare(computed(model), expected, 1e-9, f"sdpa {way}, float64")
            single = build(architecture, mechanism, positions, "sdpa", **changes).float()
            compare(computed(single), expected, 5e-6, f"sdpa {way}, float32")


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


@pytest.mark.parametrize("d_head", [4, 8, 12])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant, c per layer", "log n", "sqrt log n, r global", "beta",
                                       "alibi", "window, log n", "of one's own"])  # fmt: skip
@architectures
@pytest.mark.covering(2)
def test_every_shape_matches_the_formulas(architecture, mechanism, n_kv_heads, d_head) -> None:
    """Heads that share keys, and heads of any width: H is 4 and d 32, so H·D is 0.5, 1 and 1.5 times d."""
    check(architecture, mechanism, n_kv_heads=n_kv_heads, d_head=d_head, n_heads=4)


SHARED = {"n_heads": 4, "n_kv_heads": 2, "d_head": 12}
NORMS = dict.fromkeys(("v_norm", "attention_norm"), True)
SETTINGS = [
    {"qk_norm": False, "mechanism": "scale-invariant"}, {"d_ff": 32}, {"d_ff": 80}, {"attention_gate": "per_head"},
    {"attention_gate": "per_element", "mechanism": "scale-invariant"},
    {"attention_gate": "per_head", "mechanism": "window, log n"},
    *({name: True, "mechanism": "log n"} for name in ("v_norm", "attention_norm", "post_norm")), {"qk_norm_eps": 0.7},
    {"qk_norm_eps": 0.7, "qk_norm": False}, {"qk_norm_gain": False, **SHARED},
    {"attention_gate": "per_element", **NORMS, **SHARED},
    {"attention_gate": "per_element", "qk_norm": False, **NORMS, **SHARED},
    {"attention_gate": "per_element", "qk_norm_eps": 0.7, **NORMS, **SHARED, "n_kv_heads": 1},
    {"attention_gate": "per_element", "qk_norm_eps": 0.1, "qk_norm_gain": True, "post_norm": True, **NORMS,
    "mechanism": "pattern", "positions": "pattern"},
]  # fmt: skip
OF_ONE = [
    (GPT, {"qk_norm_gain": False}), (GPT, {"tie_embeddings": True, "mechanism": "log n"}),
    (NGPT, {"qk_norm_gain": False}), (AnGPT, {"qk_norm_gain": True}),
    *((AnGPT, {"qk_norm": qk_norm, **changes}) for qk_norm in (True, False) for changes in (
        {"s_qk": True}, {"silu_std": 1.0}, {"s_qk": True, "silu_std": 0.7, "n_kv_heads": 1},
    )),
    *((AnGPT, {"approximation": approximation, "post_norm": post_norm}) for post_norm in (True, False) for
      approximation in (Approximation(False), Approximation(False, -0.02), Approximation(error=0.1))),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes"), [
    *((architecture, changes) for changes in SETTINGS for architecture in ORACLE), *OF_ONE
], ids=str)  # fmt: skip
def test_every_setting_matches_the_formulas(architecture, changes) -> None:
    check(architecture, **changes)


def test_no_shipped_mechanism_is_forgotten() -> None:
    shipped = {getattr(mechanisms, name) for name in mechanisms.__all__}
    assert {type(mechanism) for mechanism in SHIPPED.values()} == shipped
    assert FORMULAS.keys() == MECHANISMS.keys()

"""Each architecture against the formulas written out in `naive.py`: logits and every gradient, in float64 to 1e-9."""

import pytest
import torch

from anlit import GPT, NGPT, AnGPT, NoPE, Plain, PRoPE, RoPE, ScaleInvariant
from tests.attention.examples import LogN
from tests.models.tiny import SIZE, jolt, random_tokens, tiny
from tests.parity import naive

ORACLE = {GPT: naive.gpt, NGPT: naive.ngpt, AnGPT: naive.angpt}
D_HEAD = SIZE["d_model"] // SIZE["n_heads"]
POSITIONS = {
    "rope half": (RoPE(fraction=0.5), naive.rope(D_HEAD, 0.5)),
    "rope whole": (RoPE(fraction=1.0), naive.rope(D_HEAD, 1.0)),
    "p-rope": (PRoPE(), naive.p_rope(D_HEAD)),
    "nope": (NoPE(), []),
}
MECHANISMS = {
    "plain": (Plain(), naive.plain),
    "scale-invariant": (ScaleInvariant(tau=3.0), naive.scale_invariant(3.0)),
    "log n": (LogN(), naive.log_n),
}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
ALPHA, S_Z, EPS = (0.3, 0.07), (3.0, 0.2), 1e-2


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda message: f"{what}: {message}")


def settings_of(architecture) -> dict:
    if architecture is GPT:
        return {"norm_eps": EPS}
    scales = {"alpha_init": ALPHA[0], "alpha_scale": ALPHA[1], "s_z_init": S_Z[0], "s_z_scale": S_Z[1]}
    return {**scales, "norm_eps": EPS} if architecture is AnGPT else scales


def check(architecture, mechanism="plain", positions="rope half", masked=True, qk_norm=True, d_ff=None) -> None:
    attention, logit = MECHANISMS[mechanism]
    module, frequencies = POSITIONS[positions]
    changes = {"attention": attention, "positions": module, "document_masking": masked, "qk_norm": qk_norm}
    model = jolt(tiny(architecture, d_ff=d_ff, **changes, **settings_of(architecture)).double()).model
    tokens = random_tokens(*DOCUMENTS.shape)
    probe = torch.randn(*tokens.shape, SIZE["vocab_size"], generator=torch.Generator().manual_seed(2)).double()

    embedded = []

    def keep(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.embedding.register_forward_hook(keep)
    logits = model(tokens, DOCUMENTS)
    (logits * probe).sum().backward()

    size = {key: SIZE[key] for key in ("n_heads", "n_layers", "d_model")}
    d_ff = d_ff or 4 * SIZE["d_model"]
    settings = naive.Settings(**size, d_ff=d_ff, logit=logit, frequencies=frequencies, qk_norm=qk_norm,
                              norm_eps=EPS, alpha=ALPHA, s_z=S_Z)  # fmt: skip
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    ids = DOCUMENTS if masked else None
    expected, expected_embedded = naive.run(ORACLE[architecture], copies, tokens, ids, settings)
    (expected * probe).sum().backward()

    close(logits, expected, "logits")
    close(embedded[0].grad, expected_embedded.grad, "gradient of the embedded input")
    for name, parameter in model.named_parameters():
        assert copies[name].grad is not None, f"the formulas do not use {name}"
        assert copies[name].grad.abs().max() > 1e-6, f"{name} is not put to the test"
        close(parameter.grad, copies[name].grad, f"gradient of {name}")


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "one text"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant"])
@pytest.mark.parametrize("architecture", ORACLE)
def test_matches_the_formulas(architecture, mechanism, positions, masked) -> None:
    check(architecture, mechanism, positions, masked)


@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant"])
@pytest.mark.parametrize("architecture", ORACLE)
def test_matches_without_qk_norm(architecture, mechanism) -> None:
    check(architecture, mechanism, qk_norm=False)


@pytest.mark.parametrize("d_ff", [32, 80])
@pytest.mark.parametrize("architecture", ORACLE)
def test_matches_with_another_mlp_width(architecture, d_ff) -> None:
    check(architecture, d_ff=d_ff)


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "one text"])
@pytest.mark.parametrize("architecture", ORACLE)
def test_a_mechanism_of_ones_own_matches(architecture, masked) -> None:
    check(architecture, "log n", masked=masked)

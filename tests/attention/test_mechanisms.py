"""What mechanisms promise: their settings, that what they learn is trained and saved, that a new one is one class."""

import copy

import pytest
import torch
from torch import Tensor, nn

from anlit import AnGPT, AttentionPattern, LogBias, LogN, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.attention.attention import Attention
from anlit.attention.mechanism import Mechanism
from anlit.checkpoints.loading import load_checkpoint
from anlit.layers.positions import DynamicNTK, LinearRoPE, Llama3RoPE, PositionsPattern, RoPE, YaRN
from anlit.optim.optimizers import parameter_groups
from tests.attention.examples import LEARNED, LogNWithSlopes
from tests.attention.kernels import inputs, packed
from tests.models.tiny import ARCHITECTURES, CONSTANT, SIZE, adamw, fit, random_tokens, tiny

H, LAYERS = SIZE["n_heads"], SIZE["n_layers"]
SIZES = {"globally": (1, 1), "per_layer": (LAYERS, 1), "per_head": (LAYERS, H)}
"""How many parameters a model has, and of which length."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaleInvariant(tau=0.0), "ScaleInvariant's tau must be positive, not 0.0"),
        (lambda: LogBias(tau=-1.0), "LogBias's tau must be positive, not -1.0"),
        (lambda: LogN(b=0.1, c=0.8), r"LogN's b .* b \+ c not below 1"),
        (lambda: SqrtLogN(b=-0.1, c=2.0), "SqrtLogN's b must not be negative"),
        (lambda: LogN(learned="per_token"), "learned='per_token' is unknown: choose never, globally, per_layer"),
        (lambda: LogBias(g=ScaleInvariant()), "LogBias's g .* ScaleInvariant changes logits by distance: choose"),
        (lambda: LogBias(g=LogBias()), "LogBias's g .* LogBias changes logits by distance: choose"),
        (lambda: SlidingWindow(0), "SlidingWindow's width must be at least 1 key, not 0"),
        (lambda: SlidingWindow(8, SlidingWindow(4)), "SlidingWindow's mechanism already has a window, of 4 keys"),
        (lambda: AttentionPattern([]), "AttentionPattern's layers must name at least one"),
        (lambda: PositionsPattern([]), "PositionsPattern's layers must name at least one"),
        (lambda: LinearRoPE(factor=0.5), "LinearRoPE's factor must be at least 1, not 0.5"),
        (lambda: Llama3RoPE(8.0, 0), "Llama3RoPE's training_length must be at least 1, not 0"),
        (lambda: Llama3RoPE(8.0, 9, 4.0), "low_freq_factor must be positive and less than high_freq_factor"),
        (lambda: YaRN(4.0, 9, beta_slow=40.0), "beta_slow must be positive and less than beta_fast, not 40 and 32"),
        (lambda: YaRN(4.0, 9, attention_factor=0.0), "attention_factor must be positive, not 0"),
        (lambda: DynamicNTK(training_length=0), "training_length must be at least 1, not 0"),
        (lambda: RoPE(base=1.0), "RoPE's base must be more than 1, not 1"),
        *[(lambda share=share: RoPE(share), r"RoPE's fraction must be in \(0, 1\]") for share in (0.0, -0.5, 1.5)],
    ],
)
def test_a_setting_without_meaning_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def coefficients(model: nn.Module) -> dict[str, nn.Parameter]:
    names = (".value", "strength", "slope")
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(names)}


def learned(mechanism: Mechanism) -> str:
    if isinstance(mechanism, SlidingWindow):
        return learned(mechanism.mechanism)
    return mechanism.g.learned if isinstance(mechanism, LogBias) else mechanism.learned


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.covering(1)
def test_what_is_learned_is_trained_without_decay_and_saved(architecture, name, tmp_path) -> None:
    model = tiny(architecture, attention=LEARNED[name], optimizer=adamw(lr=0.01, weight_decay=0.5), schedule=CONSTANT)
    parameters = coefficients(model)
    assert (len(parameters), len(next(iter(parameters.values())))) == SIZES[learned(LEARNED[name])]

    model(random_tokens(2, 12)).square().sum().backward()
    assert all(parameter.grad.abs().min() > 0 for parameter in parameters.values())
    model.zero_grad()

    groups = model.make_optimizer(parameter_groups(model.model)).param_groups
    for parameter in parameters.values():
        (group,) = [group for group in groups for member in group["params"] if member is parameter]
        assert (group["name"], group["weight_decay"]) == ("vectors", 0.0)

    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    fit(model, max_steps=2)
    assert all((parameter - before[key]).abs().min() > 1e-3 for key, parameter in parameters.items())

    model.trainer.save_checkpoint(tmp_path / "model.ckpt")
    saved = torch.load(tmp_path / "model.ckpt", weights_only=True)["state_dict"]
    assert {key for key in saved if key.endswith(".value")} == parameters.keys()
    loaded = load_checkpoint(str(tmp_path / "model.ckpt"), "cpu").model
    for key, parameter in coefficients(loaded).items():
        assert torch.equal(parameter, parameters[key])
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(loaded(tokens), model(tokens).detach(), rtol=1e-5, atol=1e-5)  # other kernels to train


def test_one_coefficient_serves_all_layers_of_its_model_and_of_no_other() -> None:
    template = SqrtLogN(r=1.5, learned="globally")
    one, other = (tiny(AnGPT, attention=template).model for _ in range(2))
    copied = copy.deepcopy(one)
    tokens = random_tokens(1, 8)
    unchanged = one(tokens)
    with torch.no_grad():
        other.shared_coefficients[0].value.fill_(2.0)
        copied.shared_coefficients[0].value.fill_(3.0)
    values = [[block.attention.mechanism.strength().item() for block in model.blocks] for model in (one, other, copied)]
    assert values == [[1.5] * LAYERS, [2.0] * LAYERS, [3.0] * LAYERS]
    assert template.strength().item() == 1.5
    assert torch.equal(one(tokens), unchanged)
    assert not torch.equal(copied(tokens), unchanged)


def test_a_shared_coefficient_is_a_part_of_the_decoder_and_of_no_block() -> None:
    """So it is in one shard only, the outermost, which is whole while any block runs."""
    decoder = tiny(AnGPT, attention=LogBias(g=SqrtLogN(learned="globally"))).model.double()
    assert [name for name, _ in decoder.named_parameters() if "mechanism" in name] == []
    assert len(list(decoder.shared_coefficients.parameters())) == 1
    assert decoder.blocks[0].attention.mechanism.g.strength().dtype == torch.float64
    assert list(tiny(AnGPT, attention=LogN()).model.shared_coefficients.parameters()) == []


class Stretched(Mechanism):
    def distance_gain(self, t: Tensor) -> Tensor:
        return 1 + t / 8


class Falling(Mechanism):
    def distance_bias(self, t: Tensor) -> Tensor:
        return -t / 4


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: SlidingWindow(99, inner)], ids=["alone", "window"])
@pytest.mark.parametrize("kind", [Stretched, Falling])
def test_whichever_function_a_new_mechanism_has_is_computed(kind: type[Mechanism], wrap) -> None:
    """Forward and backward, by the back end that auto takes, as key by key."""
    q, k, v, probe = (x.requires_grad_() for x in inputs(2, H, 13, 8, dtype=torch.float64))
    attention, t = Attention(wrap(kind()).for_layer(H, 8, 0), "auto"), torch.arange(13, dtype=torch.float64)
    a, m = kind().distance_gain(t), kind().distance_bias(t)
    rows = []
    for i in range(13):
        scores = (q[:, :, i : i + 1] * k[:, :, : i + 1]).sum(-1) * 8**-0.5
        back = i - torch.arange(i + 1)
        logits = scores * (1 if a is None else a[back]) + (0 if m is None else m[back])
        rows.append((logits.softmax(-1)[..., None] * v[:, :, : i + 1]).sum(2))
    outputs = attention(q, k, v, packed(2, 13, "dense")), torch.stack(rows, 2)
    results = [[out, *torch.autograd.grad(out, (q, k, v), probe)] for out in outputs]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_mechanism_is_one_class(architecture) -> None:
    """Its parameters are there per layer, at the values they were given, and training moves them."""
    model = tiny(architecture, attention=LogNWithSlopes(), optimizer=adamw(lr=0.01))
    parameters = coefficients(model)
    assert len(parameters) == 2 * LAYERS
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    assert all(torch.equal(x, torch.full((H,), 0.4)) for name, x in before.items() if "strength" in name)
    fit(model, max_steps=2)
    assert all((parameter - before[name]).abs().min() > 1e-3 for name, parameter in parameters.items())


@pytest.mark.parametrize("name", ["head_weight", "head_gain", "head_scale"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_parameter_made_in_the_constructor_is_the_layers_own_whatever_its_name(architecture, name) -> None:
    """Initial values and constraints of the network's matrices and gains are not for a mechanism's own parameters."""

    class Named(Mechanism):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.full((1,), 3.0)))

        def gain(self, n: Tensor) -> Tensor:
            return getattr(self, name) * n.log()

    model = tiny(architecture, attention=Named()).model
    model.restore_norms()
    first, second = (getattr(block.attention.mechanism, name) for block in model.blocks)
    assert first is not second
    assert first.tolist() == second.tolist() == [3.0]

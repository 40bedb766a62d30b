"""What mechanisms promise: their settings, that what they learn is trained and saved, that a new one is one class."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anlit import (
    ALiBi,
    AnGPT,
    AttentionPattern,
    BetaScaling,
    LogBias,
    LogN,
    Plain,
    ScaleInvariant,
    SlidingWindow,
    SqrtLogN,
)
from anlit.nn.attention.attention import Attention
from anlit.nn.kernels import KERNELS, eager
from anlit.nn.layers.positions import DynamicNTK, LinearRoPE, Llama3RoPE, PRoPE, RoPE, YaRN
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.mechanisms.warm_start import WarmStart, grow, warm_starts
from anlit.training.load_model import load_checkpoint
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.attention.examples import LEARNED
from tests.nn.attention.kernels import assert_same, gradients, inputs, packed
from tests.nn.models.tiny import ARCHITECTURES, CONSTANT, SIZE, adamw, fit, random_tokens, tiny

H, LAYERS = SIZE["n_heads"], SIZE["n_layers"]
SIZES = {"globally": (1, 1), "per_layer": (LAYERS, 1), "per_head": (LAYERS, H)}
"""How many parameters a model has, and of which length."""


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ScaleInvariant(tau=0.0), "ScaleInvariant's tau must be positive, not 0.0"),
    (lambda: SqrtLogN(b=0.1, c=0.8), r"SqrtLogN's b must not be negative and b \+ c not below 1"),
    (lambda: LogN(learned="per_token"), "learned='per_token' is unknown: choose never, globally, per_layer"),
    (lambda: SlidingWindow(0), "SlidingWindow's width must be at least 1 key, not 0"),
    (lambda: BetaScaling().for_layer(4, 1, 0), "BetaScaling needs a d_head .* of at least 2, not 1"),
    (lambda: AttentionPattern([]), "AttentionPattern's layers must name at least one"),
    (lambda: LinearRoPE(factor=0.5), "LinearRoPE's factor must be at least 1, not 0.5"),
    (lambda: Llama3RoPE(8.0, 9, 4.0), "low_freq_factor must be positive and less than high_freq_factor"),
    (lambda: YaRN(4.0, 9, beta_slow=40.0), "beta_slow must be positive and less than beta_fast, not 40 and 32"),
    (lambda: YaRN(4.0, 9, attention_factor=0.0), "attention_factor must be positive, not 0"),
    (lambda: DynamicNTK(training_length=0), "training_length must be at least 1, not 0"),
    (lambda: RoPE(base=1.0), "RoPE's base must be more than 1 and finite, not 1"),
    (lambda: PRoPE(0.0), "PRoPE's base must be more than 1 and finite, not 0"),
    (lambda: RoPE(1.5), r"RoPE's fraction must be in \(0, 1\]"),
])  # fmt: skip
def test_a_setting_without_meaning_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20])
def test_the_slopes_of_alibi_are_the_published_ones(n_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    t = torch.arange(9.0)
    keys_before_the_last = bloom.build_alibi_tensor(torch.ones(1, 9), n_heads, torch.float32)[:, 0]
    bias = ALiBi().for_layer(n_heads, 8, 0).distance_bias(t)
    torch.testing.assert_close(bias, -keys_before_the_last)


WRAPPERS = {
    "pattern": lambda part: AttentionPattern([LogN(0.7, "never"), part]), "window": lambda part: SlidingWindow(4, part),
    "warm start": WarmStart, "bias": lambda part: LogBias(2.0, part),
}  # fmt: skip
N, DISTANCES = torch.arange(1.0, 9)[None, None], torch.arange(8.0)
Form = tuple[int | None, Tensor | None, Tensor | None, Tensor | None]


def form(part: Any, layer: int) -> Form:
    """The window, and g, a and m at `N` and `DISTANCES`, of a layer; ValueError where a nesting has no meaning."""
    if isinstance(part, AttentionPattern):
        return form(part.layers[layer % 2], layer // 2)
    if isinstance(part, LogBias):
        window, g, a, m = form(part.g, layer)
        if (window, a, m) != (None, None, None):
            raise ValueError(
                "LogBias's g must be a mechanism of g.* changes logits by distance: choose Plain, LogN"
            )
        return None, g, None, -torch.log1p(DISTANCES / 2)
    if isinstance(part, SlidingWindow | WarmStart):
        window, g, a, m = form(part.mechanism, layer)
        if window is not None:
            raise ValueError(
                f"{type(part).__name__}'s mechanism (already )?has a window, of 4 keys"
            )
        if isinstance(part, SlidingWindow):
            return 4, g, a, m
        return None, *(x if x is None else x0 + (x - x0) / 4 for x0, x in ((1, g), (1, a), (0, m)))
    return None, part.gain(N), part.distance_gain(DISTANCES), part.distance_bias(DISTANCES)


@pytest.mark.parametrize("leaf", [SqrtLogN(), ScaleInvariant()], ids=["g", "a and m"])
@pytest.mark.parametrize("names", itertools.product(WRAPPERS, repeat=3), ids=" of ".join)
def test_a_nesting_keeps_every_part_in_each_layer_or_is_refused(names, leaf) -> None:
    mechanism = functools.reduce(lambda part, name: WRAPPERS[name](part), reversed(names), leaf)
    for number in range(8):
        try:
            expected = form(mechanism, number)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                mechanism.for_layer(H, 8, number)
            continue
        layer = mechanism.for_layer(H, 8, number)
        grow(warm_starts(layer), 25)  # of 100 steps
        actual = (
            layer.window,
            layer.gain(N),
            layer.distance_gain(DISTANCES),
            layer.distance_bias(DISTANCES),
        )
        torch.testing.assert_close(actual, expected)


def coefficients(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter for name, parameter in model.named_parameters() if name.endswith(".value")
    }


def learned(mechanism: Any) -> str:
    inner = getattr(mechanism, "mechanism", getattr(mechanism, "g", None))
    return mechanism.learned if inner is None else learned(inner)


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.covering(1)
def test_what_is_learned_is_trained_without_decay_and_saved(architecture, name, tmp_path) -> None:
    model = tiny(
        architecture,
        attention=LEARNED[name],
        optimizer=adamw(lr=0.01, weight_decay=0.5),
        schedule=CONSTANT,
    )
    parameters = coefficients(model)
    assert (len(parameters), len(next(iter(parameters.values())))) == SIZES[learned(LEARNED[name])]
    model(random_tokens(2, 12)).square().sum().backward()
    assert all(parameter.grad.abs().min() > 1e-4 for parameter in parameters.values())
    model.zero_grad()
    groups = model.make_optimizer(parameter_groups(model.model)).param_groups
    (vectors,) = (group for group in groups if group["name"] == "vectors")
    assert vectors["weight_decay"] == 0.0
    assert {*map(id, parameters.values())} <= {*map(id, vectors["params"])}

    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    fit(model, max_steps=2)
    assert all(
        (parameter - before[key]).abs().min() > 1e-3 for key, parameter in parameters.items()
    )
    model.trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = load_checkpoint(str(tmp_path / "model.ckpt"), "cpu").model
    torch.testing.assert_close(
        coefficients(loaded), {key: p.detach() for key, p in parameters.items()}, rtol=0, atol=0
    )


def test_one_coefficient_serves_all_layers_of_its_model_and_of_no_other() -> None:
    """It is a part of the decoder and of no block: in the outermost shard, which is whole while a block runs."""
    template, tokens = SqrtLogN(r=1.5, learned="globally"), random_tokens(1, 8)
    one, other = (tiny(AnGPT, attention=template).model for _ in range(2))
    copied, unchanged = copy.deepcopy(one), one(tokens)
    with torch.no_grad():
        other.shared_coefficients[0].value.fill_(2.0)
        copied.shared_coefficients[0].value.fill_(3.0)
    values = [
        [block.attention.mechanism.strength().item() for block in model.blocks]
        for model in (one, other, copied)
    ]
    assert values == [[1.5] * LAYERS, [2.0] * LAYERS, [3.0] * LAYERS]
    assert template.strength().item() == 1.5
    assert torch.equal(one(tokens), unchanged)
    assert (copied(tokens) - unchanged).abs().max() > 1e-3
    wide = tiny(AnGPT, attention=LogBias(g=SqrtLogN(learned="globally"))).model.double()
    assert [name for name, _ in wide.named_parameters() if "mechanism" in name] == []
    assert len([*wide.shared_coefficients.parameters()]) == 1
    assert wide.blocks[0].attention.mechanism.g.strength().dtype == torch.float64


@pytest.mark.parametrize("function", [
    {"distance_gain": lambda self, t: 1 + t / 8}, {"distance_bias": lambda self, t: -t / 4}])  # fmt: skip
def test_whichever_function_a_new_mechanism_has_is_computed(function) -> None:
    """By the kernel that auto takes, alone and inside of a window."""
    kind, tensors = type("Own", (Mechanism,), function), inputs(2, H, 13, 8, dtype=torch.float64)
    for mechanism in (kind(), SlidingWindow(99, kind())):
        layer = mechanism.for_layer(H, 8, 0)
        auto = KERNELS[Attention(layer, "auto").kernel_for(tensors[0], is_packed=False)]
        attends = ((auto, layer), (eager, layer), (eager, Plain().for_layer(H, 8, 0)))
        result, expected, plain = (
            gradients(b.attend, m, tensors, packed(2, 13, "dense")) for b, m in attends
        )
        assert_same(result, expected)
        assert not torch.allclose(expected["output"], plain["output"], rtol=1e-3)


@pytest.mark.parametrize("name", ["head_weight", "head_gain", "head_scale"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.covering(1)
def test_a_new_mechanism_is_one_class_and_its_parameters_are_its_own_whatever_their_name(
    architecture, name
) -> None:
    """Each layer has them at the values that they were given, without our matrices' initial values and constraints."""

    class Named(Mechanism):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.full((1,), 3.0)))

        def gain(self, n: Tensor) -> Tensor:
            return getattr(self, name) * n.log()

    model = tiny(architecture, attention=Named(), optimizer=adamw(lr=0.01))
    model.model.restore_norms()
    first, second = (getattr(block.attention.mechanism, name) for block in model.model.blocks)
    assert first is not second
    assert first.tolist() == second.tolist() == [3.0]
    fit(model, max_steps=2)
    assert min(abs(first.item() - 3), abs(second.item() - 3)) > 1e-3


def test_a_coefficient_that_layers_share_moves_with_a_mechanism_that_refers_to_it() -> None:
    """`.to` on the mechanism alone, as a user's own module has it; the layers go on sharing one parameter."""
    template = LogBias(g=SqrtLogN(learned="globally"))
    first, second = (template.for_layer(2, 8, layer) for layer in range(2))
    shared = template.g.strength

    first.to(torch.float64)
    assert first.g.strength().dtype == torch.float64
    assert second.g.strength.coefficient is first.g.strength.coefficient is shared

    first.to("meta")
    assert first.g.strength().is_meta
    assert len([*torch.nn.ModuleList([first, second]).parameters()]) == 0

"""Mechanisms: their settings, how learned coefficients are trained and saved, new mechanisms."""

import copy
import itertools
from typing import Any, NamedTuple

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
from anlit.nn.layers.positions import (
    DynamicNTK,
    LinearRoPE,
    Llama3RoPE,
    PositionsPattern,
    PRoPE,
    RoPE,
    YaRN,
)
from anlit.nn.mechanisms.mechanism import Mechanism, MechanismWrapper
from anlit.nn.mechanisms.warm_start import WarmStart, grow, warm_starts
from anlit.training.load_model import load_checkpoint
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.attention.examples import LEARNED
from tests.nn.attention.kernels import assert_same, gradients, inputs, packed
from tests.nn.models.tiny import CONSTANT, SIZE, adamw, architectures, fit, random_tokens, tiny

H = SIZE["n_heads"]
LAYERS = SIZE["n_layers"]
SIZES = {
    "globally": (1, 1),
    "per_layer": (LAYERS, 1),
    "per_head": (LAYERS, H),
}
"""The number of parameters of a model, and their length."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaleInvariant(tau=0.0), "ScaleInvariant's tau must be positive, not 0.0"),
        (
            lambda: SqrtLogN(b=0.1, c=0.8),
            r"SqrtLogN's b must not be negative and b \+ c not below 1",
        ),
        (lambda: LogN(b=-0.1, c=2.0), "LogN's b must not be negative .* b=-0.1, c=2.0"),
        (lambda: LogBias(tau=0.0), "LogBias's tau must be positive, not 0.0"),
        (lambda: WarmStart(LogN(), steps=0), "WarmStart's steps must be at least 1, not 0"),
        (
            lambda: MechanismWrapper(LogN()),
            "MechanismWrapper is not a mechanism by itself",
        ),
        (
            lambda: LogN(learned="per_token"),
            "learned='per_token' is unknown: choose never, globally, per_layer",
        ),
        (lambda: SlidingWindow(0), "SlidingWindow's width must be at least 1 key, not 0"),
        (
            lambda: BetaScaling().for_layer(4, 1, 0),
            "BetaScaling needs a d_head .* of at least 2, not 1",
        ),
        (lambda: AttentionPattern([]), "AttentionPattern's layers must name at least one"),
        (lambda: PositionsPattern([]), "PositionsPattern's layers must name at least one kind"),
        (lambda: LinearRoPE(factor=0.5), "LinearRoPE's factor must be at least 1, not 0.5"),
        (
            lambda: Llama3RoPE(8.0, 9, 4.0),
            "low_freq_factor must be positive and less than high_freq_factor",
        ),
        (
            lambda: YaRN(4.0, 9, beta_slow=40.0),
            "beta_slow must be positive and less than beta_fast, not 40 and 32",
        ),
        (lambda: YaRN(4.0, 9, attention_factor=0.0), "attention_factor must be positive, not 0"),
        (lambda: DynamicNTK(training_length=0), "training_length must be at least 1, not 0"),
        (lambda: RoPE(base=1.0), "RoPE's base must be more than 1 and finite, not 1"),
        (lambda: PRoPE(0.0), "PRoPE's base must be more than 1 and finite, not 0"),
        (lambda: RoPE(1.5), r"RoPE's fraction must be in \(0, 1\]"),
    ],
)
def test_a_setting_without_meaning_is_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogN(b=0.0, c=1.0),
        lambda: SlidingWindow(1),
        lambda: WarmStart(LogN(), steps=1),
        lambda: BetaScaling().for_layer(4, 2, 0),
        lambda: LinearRoPE(factor=1.0),
        lambda: DynamicNTK(training_length=1),
        lambda: RoPE(fraction=1.0),
        lambda: RoPE(fraction=0.5).check(4),
        lambda: DynamicNTK(fraction=0.5).check(8),
    ],
)
def test_the_least_and_the_largest_setting_with_meaning_is_accepted(make) -> None:
    make()


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8, 12, 20])
def test_the_slopes_of_alibi_are_the_published_slopes(n_heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    t = torch.arange(9.0)
    mask = torch.ones(1, 9)
    published = bloom.build_alibi_tensor(mask, n_heads, torch.float32)[:, 0]

    bias = ALiBi().for_layer(n_heads, 8, 0).distance_bias(t)

    # The published bias grows towards the last key.
    torch.testing.assert_close(bias, -published)


WRAPPERS = {
    "pattern": lambda inner: AttentionPattern([LogN(0.7, "never"), inner]),
    "window": lambda inner: SlidingWindow(4, inner),
    "warm start": WarmStart,
    "bias": lambda inner: LogBias(2.0, inner),
}
N = torch.arange(1.0, 9)[None, None]
DISTANCES = torch.arange(8.0)


class Form(NamedTuple):
    """The window of a layer, and its g, a and m at `N` and `DISTANCES`."""

    window: int | None
    g: Tensor | None
    a: Tensor | None
    m: Tensor | None


def quarter(start: float, end: Tensor | None) -> Tensor | None:
    """A quarter of the way from `start` to `end`, as after 25 of 100 steps."""
    return None if end is None else start + (end - start) / 4


def form(mechanism: Any, layer: int) -> Form:
    """The form of a layer; ValueError if a nesting has no meaning."""
    if isinstance(mechanism, AttentionPattern):
        return form(mechanism.layers[layer % 2], layer // 2)
    if isinstance(mechanism, LogBias):
        window, g, a, m = form(mechanism.g, layer)
        if (window, a, m) != (None, None, None):
            raise ValueError(
                "LogBias's g must be a mechanism of g.* changes logits by distance: choose Plain"
            )
        return Form(None, g, None, -torch.log1p(DISTANCES / 2))
    if isinstance(mechanism, SlidingWindow | WarmStart):
        window, g, a, m = form(mechanism.mechanism, layer)
        if window is not None:
            name = type(mechanism).__name__
            raise ValueError(f"{name}'s mechanism (already )?has a window, of 4 keys")
        if isinstance(mechanism, SlidingWindow):
            return Form(4, g, a, m)
        return Form(None, quarter(1, g), quarter(1, a), quarter(0, m))
    return form_of_functions(mechanism, window=None)


def form_of_functions(mechanism: Mechanism, window: int | None) -> Form:
    g = mechanism.gain(N)
    a = mechanism.distance_gain(DISTANCES)
    m = mechanism.distance_bias(DISTANCES)
    return Form(window, g, a, m)


@pytest.mark.parametrize("leaf", [SqrtLogN(), ScaleInvariant()], ids=["g", "a and m"])
@pytest.mark.parametrize("names", itertools.product(WRAPPERS, repeat=3), ids=" of ".join)
def test_a_nesting_keeps_all_mechanisms_in_each_layer_or_is_refused(names, leaf) -> None:
    mechanism = leaf
    for name in reversed(names):
        mechanism = WRAPPERS[name](mechanism)
    for number in range(8):
        try:
            expected = form(mechanism, number)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                mechanism.for_layer(H, 8, number)
            continue
        layer = mechanism.for_layer(H, 8, number)
        grow(warm_starts(layer), 25)  # of 100 steps
        actual = form_of_functions(layer, layer.window)
        torch.testing.assert_close(tuple(actual), tuple(expected))


def coefficients(model: nn.Module) -> dict[str, nn.Parameter]:
    coefficients = {}
    for name, parameter in model.named_parameters():
        if name.endswith(".value"):
            coefficients[name] = parameter
    return coefficients


def learned(mechanism: Any) -> str:
    """The setting `learned` of a mechanism, or of the mechanism inside it."""
    inner = getattr(mechanism, "mechanism", getattr(mechanism, "g", None))
    return mechanism.learned if inner is None else learned(inner)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its coefficients."""
    values = {}
    for name, parameter in coefficients(model).items():
        values[name] = parameter.detach().clone()
    return values


@pytest.mark.parametrize("name", LEARNED)
@architectures
@pytest.mark.covering(1)
def test_coefficients_are_trained_without_decay_and_saved(architecture, name, tmp_path) -> None:
    model = tiny(
        architecture,
        attention=LEARNED[name],
        optimizer=adamw(lr=0.01, weight_decay=0.5),
        schedule=CONSTANT,
    )
    parameters = coefficients(model)
    n_parameters, length = SIZES[learned(LEARNED[name])]
    assert len(parameters) == n_parameters
    logits = model(random_tokens(2, 12))
    logits.square().sum().backward()
    for parameter in parameters.values():
        assert len(parameter) == length
        assert parameter.grad.abs().min() > 1e-4
    model.zero_grad()
    optimizer = model.make_optimizer(parameter_groups(model.model))
    groups = {group["name"]: group for group in optimizer.param_groups}
    vectors = groups["vectors"]
    ids_of_vectors = {*map(id, vectors["params"])}
    assert vectors["weight_decay"] == 0.0
    for parameter in parameters.values():
        assert id(parameter) in ids_of_vectors

    initial = values_of(model)
    fit(model, max_steps=2)
    trained = values_of(model)
    for key in initial:
        change = trained[key] - initial[key]
        assert change.abs().min() > 1e-3

    file = tmp_path / "model.ckpt"
    model.trainer.save_checkpoint(file)
    loaded = load_checkpoint(str(file), "cpu").model
    torch.testing.assert_close(values_of(loaded), trained, rtol=0, atol=0)


def strengths(model: nn.Module) -> list[float]:
    return [block.attention.mechanism.strength().item() for block in model.blocks]


def test_a_shared_coefficient_serves_all_layers_of_its_model_alone() -> None:
    """It belongs to the decoder: to the outermost shard, which is whole while a block runs."""
    template = SqrtLogN(r=1.5, learned="globally")
    tokens = random_tokens(1, 8)
    first = tiny(AnGPT, attention=template).model
    second = tiny(AnGPT, attention=template).model
    copied = copy.deepcopy(first)
    logits = first(tokens)

    with torch.no_grad():
        second.shared_coefficients[0].value.fill_(2.0)
        copied.shared_coefficients[0].value.fill_(3.0)

    assert strengths(first) == [1.5] * LAYERS
    assert strengths(second) == [2.0] * LAYERS
    assert strengths(copied) == [3.0] * LAYERS
    assert template.strength().item() == 1.5
    assert torch.equal(first(tokens), logits)
    assert (copied(tokens) - logits).abs().max() > 1e-3


def test_a_shared_coefficient_changes_its_precision_with_the_model() -> None:
    mechanism = LogBias(g=SqrtLogN(learned="globally"))
    model = tiny(AnGPT, attention=mechanism).model

    model.double()

    of_mechanisms = [name for name, _ in model.named_parameters() if "mechanism" in name]
    assert of_mechanisms == []
    assert len([*model.shared_coefficients.parameters()]) == 1
    strength = model.blocks[0].attention.mechanism.g.strength()
    assert strength.dtype == torch.float64


@pytest.mark.parametrize(
    "function",
    [{"distance_gain": lambda self, t: 1 + t / 8}, {"distance_bias": lambda self, t: -t / 4}],
)
def test_whichever_function_a_new_mechanism_has_is_computed(function) -> None:
    """By the kernel that auto takes, alone and inside of a window."""
    new_class = type("New", (Mechanism,), function)
    tensors = inputs(2, H, 13, 8, dtype=torch.float64)
    documents = packed(2, 13, "dense")
    plain_layer = Plain().for_layer(H, 8, 0)
    plain = gradients(eager.attend, plain_layer, tensors, documents)
    for mechanism in (new_class(), SlidingWindow(99, new_class())):
        layer = mechanism.for_layer(H, 8, 0)
        kernel_name = Attention(layer, "auto").kernel_for(tensors[0], is_packed=False)
        kernel = KERNELS[kernel_name]

        result = gradients(kernel.attend, layer, tensors, documents)
        expected = gradients(eager.attend, layer, tensors, documents)

        assert_same(result, expected)
        assert not torch.allclose(expected["output"], plain["output"], rtol=1e-3)


@pytest.mark.parametrize("name", ["head_weight", "head_gain", "head_scale"])
@architectures
@pytest.mark.covering(1)
def test_a_new_mechanism_is_one_class_and_its_parameters_are_its_own_whatever_their_name(
    architecture, name
) -> None:
    """Each layer has them at their values, without our matrices' initial values and constraints."""

    class Named(Mechanism):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.full((1,), 3.0)))

        def gain(self, n: Tensor) -> Tensor:
            return getattr(self, name) * n.log()

    model = tiny(architecture, attention=Named(), optimizer=adamw(lr=0.01))
    model.model.restore_norms()
    first, second = [getattr(block.attention.mechanism, name) for block in model.model.blocks]
    assert first is not second
    assert first.tolist() == [3.0]
    assert second.tolist() == [3.0]

    fit(model, max_steps=2)

    for parameter in (first, second):
        assert abs(parameter.item() - 3) > 1e-3


def test_a_coefficient_that_layers_share_moves_with_a_mechanism_that_refers_to_it() -> None:
    """`.to` on the mechanism alone, as in a user's module.

    The layers go on sharing the parameter.
    """
    template = LogBias(g=SqrtLogN(learned="globally"))
    first, second = (template.for_layer(2, 8, layer) for layer in range(2))
    shared = template.g.strength

    first.to(torch.float64)
    assert first.g.strength().dtype == torch.float64
    assert second.g.strength.coefficient is first.g.strength.coefficient is shared

    first.to("meta")
    assert first.g.strength().is_meta
    both = nn.ModuleList([first, second])
    assert [*both.parameters()] == []

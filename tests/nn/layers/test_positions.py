"""Rotations: transformers has the same frequencies, tables are exact. Formulas: tests/parity."""

import math

import pytest
import torch
from torch import Tensor

from anlit import GPT, DynamicNTK, LinearRoPE, Llama3RoPE, NoPE, PositionsPattern, PRoPE, RoPE, YaRN
from anlit.nn.layers.positions import Positions, rotate
from tests.nn.models.tiny import random_tokens, tiny

D_HEAD = 16
LENGTH = 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def turned(positions: Positions, x: Tensor, index: Tensor | None = None) -> Tensor:
    """x (B, T, H, D), rotated as the layers of a model do."""
    _, length, _, width = x.shape
    rotation = positions.rotation(width, length, index, x)
    y, _ = rotate(rotation, x, x)
    return y


def rotated_pair_by_pair(positions: Positions, x: Tensor, index: Tensor) -> Tensor:
    """x (B, T, H, D) as complex numbers x_i + i·x_{i + R/2} times scale·e^{i·angle}."""
    _, length, _, width = x.shape
    frequencies = positions.frequencies(width, length)
    n_pairs = len(frequencies)
    angles = index[:, :, None, None] * frequencies
    numbers = torch.complex(x[..., :n_pairs], x[..., n_pairs : 2 * n_pairs])
    turned_numbers = numbers * torch.polar(torch.full_like(angles, positions.scale), angles)
    rest = x[..., 2 * n_pairs :]
    return torch.cat((turned_numbers.real, turned_numbers.imag, rest), dim=-1)


ROTATIONS = [
    RoPE(0.25),
    RoPE(0.5),
    RoPE(0.75),
    RoPE(1.0),
    PRoPE(),
    DynamicNTK(training_length=10),
    YaRN(factor=4.0, training_length=16, fraction=0.75),
    YaRN(factor=4.0, training_length=16, fraction=0.5),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", ROTATIONS)
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.covering(2)
def test_q_and_k_and_their_gradients_are_rotated_as_complex_numbers(
    positions, packed, compiles
) -> None:
    """Heads share keys. Compiled code has the formula, training on a CPU a gradient by hand."""
    q = normal(2, LENGTH, 4, D_HEAD).requires_grad_()
    k = normal(2, LENGTH, 2, D_HEAD, seed=1).requires_grad_()
    index = torch.arange(LENGTH).expand(2, LENGTH)
    if packed:
        index = index % torch.tensor([[7], [13]])
    expected_q = rotated_pair_by_pair(positions, q, index)
    expected_k = rotated_pair_by_pair(positions, k, index)
    weights = normal(*q.shape, seed=2), normal(*k.shape, seed=3)
    expected = torch.autograd.grad((expected_q, expected_k), (q, k), weights)

    rotation = positions.rotation(D_HEAD, LENGTH, index if packed else None, q)
    function = torch.compile(rotate, backend="eager", fullgraph=True) if compiles else rotate
    rotated = function(rotation, q, k)
    gradients = torch.autograd.grad(rotated, (q, k), weights)

    torch.testing.assert_close(rotated, (expected_q, expected_k), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_nope_rotates_nothing() -> None:
    q = normal(1, LENGTH, 2, D_HEAD)
    k = normal(1, LENGTH, 1, D_HEAD)

    rotated = rotate(NoPE().rotation(D_HEAD, LENGTH, None, q), q, k)

    assert rotated == (q, k)


@pytest.mark.parametrize(
    ("length", "context"),
    [
        (None, 8),
        (8, 16),
    ],
)
def test_dynamic_ntk_is_rope_up_to_the_training_length_of_its_model(length, context) -> None:
    """The length of the sequence counts, also if it packs several documents (tests/parity)."""
    short = random_tokens(1, 8)
    long = random_tokens(1, 9)
    positions = DynamicNTK(training_length=length)

    model = tiny(GPT, context_length=context, positions=positions)
    rope_model = tiny(GPT, context_length=context, positions=RoPE())

    for block in model.model.blocks:
        assert block.positions.training_length == 8
    assert positions.training_length == length
    assert torch.equal(model(short), rope_model(short))
    difference = model(long) - rope_model(long)
    assert difference.abs().max() > 1e-4


def test_a_pattern_inside_a_pattern_has_its_entries_in_turn() -> None:
    inner = PositionsPattern([NoPE(), PRoPE()])
    outer = PositionsPattern([RoPE(), inner])

    model = tiny(GPT, positions=outer, n_layers=6).model

    kinds = [type(block.positions) for block in model.blocks]
    assert kinds == [RoPE, NoPE, RoPE, PRoPE, RoPE, NoPE]
    model(random_tokens(1, 5))


ROPE_TYPES = {LinearRoPE: "linear", DynamicNTK: "dynamic", Llama3RoPE: "llama3", YaRN: "yarn"}
"""The types of transformers."""

STRETCHED = [
    (LinearRoPE, None, {"factor": 2.5}),
    (DynamicNTK, 2048, {}),
    (Llama3RoPE, 8192, {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    (Llama3RoPE, 100, {"factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 9.0}),
    (YaRN, 32768, {"factor": 4.0}),
    (YaRN, 4096, {"factor": 40.0, "beta_fast": 20.0, "beta_slow": 2.0}),
    (YaRN, 1000, {"factor": 8.0, "truncate": False, "attention_factor": 1.25}),
    (YaRN, 5, {"factor": 16.0}),
]
"""Class, training length, and the settings that transformers has too."""


@pytest.mark.parametrize(
    ("base", "fraction"),
    [
        (10_000.0, 1.0),
        (1e6, 0.5),
    ],
)
@pytest.mark.parametrize(("kind", "training_length", "settings"), STRETCHED)
def test_stretched_rope_has_the_frequencies_of_transformers(
    kind, training_length, settings, base, fraction, monkeypatch
) -> None:
    """The frequencies agree in transformers' precision, and with its code in float64."""
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rope_type = ROPE_TYPES[kind]
    length = 3 * (training_length or 1000)
    rope = {
        "rope_type": rope_type,
        "rope_theta": base,
        "partial_rotary_factor": fraction,
        "factor": 1.0,
        **settings,
    }
    if kind in (Llama3RoPE, YaRN):
        rope["original_max_position_embeddings"] = training_length
    longest = training_length if kind is DynamicNTK else length
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters=rope,
    )
    if training_length is not None:
        settings = {**settings, "training_length": training_length}
    positions = kind(**settings, base=base, fraction=fraction)

    frequencies, scale = functions[rope_type](config, seq_len=length)

    assert positions.scale == pytest.approx(scale, rel=1e-15)
    actual = positions.frequencies(64, length)
    torch.testing.assert_close(actual.float(), frequencies, rtol=2e-6, atol=0)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)
    exact, _ = functions[rope_type](config, seq_len=length)
    torch.testing.assert_close(actual, exact, rtol=1e-12, atol=0)
    unstretched = RoPE(fraction, base).frequencies(64, length)
    assert not torch.allclose(exact, unstretched, rtol=0.1)


def test_the_attention_factor_of_yarn_lengthens_the_rotated_dimensions() -> None:
    """The gradient of training on a CPU, which is written by hand, has it too."""
    positions = YaRN(factor=4.0, training_length=16, fraction=0.5)
    x = normal(1, 5, 1, D_HEAD).requires_grad_()

    y = turned(positions, x)

    rotated_x, other_x = x.chunk(2, -1)
    rotated_y, other_y = y.chunk(2, -1)
    factor = 0.1 * math.log(4) + 1
    expected_norms = factor * rotated_x.norm(dim=-1)
    norms = rotated_y.norm(dim=-1)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(other_y, other_x, rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(lambda x: turned(positions, x), x)


@pytest.mark.parametrize("positions", [RoPE(fraction=0.5), PRoPE()])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-11),
        (torch.float32, 6e-8),
    ],
)
def test_tables_are_exact_at_position_60_000(positions, dtype, tolerance) -> None:
    frequencies = positions.frequencies(64, 60_001)
    like = torch.zeros(1, dtype=dtype)

    cos, sin = positions.tables(64, 60_001, like)

    assert cos.dtype == dtype
    assert sin.dtype == dtype
    angles = [60_000 * frequency for frequency in frequencies.tolist()]
    expected_cos = [math.cos(angle) for angle in angles]
    expected_sin = [math.sin(angle) for angle in angles]
    assert cos[60_000].tolist() == pytest.approx(expected_cos, abs=tolerance, rel=0)
    assert sin[60_000].tolist() == pytest.approx(expected_sin, abs=tolerance, rel=0)


def test_half_precision_is_rotated_with_float32_tables() -> None:
    x = normal(1, LENGTH, 1, D_HEAD)
    narrow_x = x.bfloat16()
    positions = RoPE(fraction=1.0)

    y = turned(positions, narrow_x)

    cos, _ = positions.tables(D_HEAD, LENGTH, narrow_x)
    assert y.dtype == torch.bfloat16
    assert cos.dtype == torch.float32
    expected = turned(positions, x)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.04)


def test_tables_follow_width_length_and_dtype_and_inference_mode_does_not_spoil_training() -> None:
    """Lightning's validation runs in inference mode."""
    positions = RoPE(fraction=1.0)
    for length, width, dtype in (
        (8, 16, torch.float64),
        (5, 16, torch.float64),
        (5, 8, torch.float64),
        (5, 8, torch.float32),
        (9, 8, torch.float32),
    ):
        x = normal(1, length, 1, width).to(dtype).requires_grad_()

        with torch.inference_mode():
            y = turned(positions, x)
            expected = turned(RoPE(fraction=1.0), x)
        turned(positions, x).sum().backward()

        assert torch.equal(y, expected)

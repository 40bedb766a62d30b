"""The loss without all logits is the loss from the logits: value, gradients, targets, precision."""

from functools import partial

import pytest
import torch
from torch import Tensor

from anlit.nn.layers import cross_entropy
from anlit.nn.layers.cross_entropy import IGNORE_INDEX, linear_cross_entropy
from tests.nn.models.tiny import architectures, next_token_loss, random_tokens, tiny

V = 37
D = 6


assert_close_in_float64 = partial(torch.testing.assert_close, rtol=1e-12, atol=0)


@pytest.fixture
def chunks_of_five(monkeypatch) -> None:
    """12 tokens are two chunks and a smaller chunk."""
    monkeypatch.setattr(cross_entropy, "chunk_size", lambda *_: 5)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, T, D), the head (V, D) and targets (B, T), of which three do not count."""
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(2, 6, D, generator=generator, dtype=torch.float64)
    weight = 2 * torch.randn(V, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (2, 6), generator=generator)
    targets[0, 2:4] = IGNORE_INDEX
    targets[1, 5] = IGNORE_INDEX
    x = x.to(dtype).requires_grad_()
    weight = weight.to(dtype).requires_grad_()
    return x, weight, targets


def gradients(objective: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(objective, tensors))


@pytest.mark.parametrize(
    ("z_loss", "upstream", "compiled"),
    [
        (0.0, 1.0, False),
        (0.3, 0.25, False),
        (0.3, 1.0, True),
    ],
)
def test_it_is_the_loss_of_the_logits(
    z_loss, upstream, compiled, chunks_of_five, monkeypatch
) -> None:
    """Compilation traces the code, without the compiler's kernels."""
    traced = torch.compile(cross_entropy._chunk_losses, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(cross_entropy, "_compiled_chunk_losses", lambda: traced)
    x, weight, targets = inputs()

    loss, objective = linear_cross_entropy(x, weight, targets, z_loss, compiled)
    actual = gradients(objective * upstream, x, weight)

    logits = x @ weight.mT
    expected_loss, expected_objective = next_token_loss(logits, targets, z_loss)
    expected = gradients(expected_objective * upstream, x, weight)
    assert_close_in_float64(loss, expected_loss)
    assert_close_in_float64(objective, expected_objective)
    assert not loss.requires_grad
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)
    dx, _ = actual
    assert dx[0, 2:4].abs().max() == 0, "tokens that do not count get no gradient"


def test_extreme_logits_stay_finite(chunks_of_five) -> None:
    x, weight, targets = inputs(torch.float32)

    loss, objective = linear_cross_entropy(x * 300, weight, targets)
    (dx,) = gradients(objective, x)

    logits = x * 300 @ weight.mT
    expected_loss, _ = next_token_loss(logits, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    assert dx.isfinite().all()


def test_without_any_target_the_loss_is_zero(chunks_of_five) -> None:
    x, weight, targets = inputs(torch.float32)
    targets[:] = IGNORE_INDEX

    loss, objective = linear_cross_entropy(x, weight, targets, 0.1)
    (dx,) = gradients(objective, x)

    assert loss == 0
    assert objective == 0
    assert dx.abs().max() == 0


def test_only_tensors_that_require_a_gradient_get_it_and_validation_saves_nothing(
    chunks_of_five,
) -> None:
    x, weight, targets = inputs()
    _, objective_of_x = linear_cross_entropy(x, weight.detach(), targets)
    objective_of_x.backward()
    assert x.grad is not None

    with torch.no_grad():
        loss, objective = linear_cross_entropy(x, weight, targets)
        expected_loss, _ = next_token_loss(x @ weight.mT, targets)

    assert objective.grad_fn is None
    torch.testing.assert_close(loss, expected_loss)


def test_autocast_computes_products_in_its_precision_and_the_rest_in_float32(
    chunks_of_five,
) -> None:
    x, weight, targets = inputs(torch.float32)
    exact_x, exact_weight, _ = inputs()
    _, exact_objective = next_token_loss(exact_x @ exact_weight.mT, targets)
    exact_gradients = gradients(exact_objective, exact_x, exact_weight)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, objective = linear_cross_entropy(x, weight, targets)
        expected, _ = next_token_loss(x @ weight.mT, targets)
    actual_gradients = gradients(objective, x, weight)

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for gradient, reference in zip(actual_gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert_near(gradient, reference, 2e-2)


def assert_near(gradient: Tensor, reference: Tensor, bound: float) -> None:
    """Check the relative error of a gradient as a whole."""
    error = gradient.cpu().double() - reference
    assert error.norm() < bound * reference.norm()


@pytest.mark.parametrize(
    ("device", "vocab_size", "width", "n_tokens", "expected"),
    [
        ("cpu", 1024, 64, 16_384, 1024),
        ("cpu", 50_304, 768, 16_384, 768),
        ("cuda", 1024, 64, 2**20, 2**18),
        ("cuda", 50_304, 768, 16_384, 4096),
        ("cuda", 50_304, 768, 2048, 2048),
        ("cuda", 50_304, 768, 65_536, 4096),
        ("cuda", 50_304, 768, 12_288, 4096),
        ("cuda", 50_304, 768, 16_383, 4096),
    ],
)
def test_chunks_hold_a_bounded_number_of_logits_and_are_equal_on_a_gpu(
    device, vocab_size, width, n_tokens, expected
):
    """Numbers of tokens that no equal chunks hold have multiples of 256 and a smaller chunk."""
    assert cross_entropy.chunk_size(device, vocab_size, width, n_tokens) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_is_the_loss_of_the_logits(compiled, monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_size", lambda *_: 256)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 200, 64, generator=generator)
    weight = torch.randn(1000, 64, generator=generator)
    targets = torch.randint(1000, (3, 200), generator=generator)
    exact_x = x.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    x = x.cuda().requires_grad_()
    weight = weight.cuda().requires_grad_()

    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, objective = linear_cross_entropy(x, weight, targets.cuda(), compiled=compiled)
    actual = gradients(objective, x, weight)

    expected_loss, _ = next_token_loss(exact_x @ exact_weight.mT, targets)
    expected = gradients(expected_loss, exact_x, exact_weight)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=2e-3)
    for gradient, reference in zip(actual, expected, strict=True):
        assert_near(gradient, reference, 1e-2)


@architectures
def test_the_loss_of_a_model_is_the_loss_of_its_logits(architecture) -> None:
    model = tiny(architecture).model.double()
    tokens = random_tokens(2, 16)
    targets = random_tokens(2, 16, seed=1)

    loss, objective = model(tokens, targets=targets, z_loss=0.2)
    actual = gradients(objective, *model.parameters())

    expected_loss, expected_objective = next_token_loss(model(tokens), targets, 0.2)
    expected = gradients(expected_objective, *model.parameters())
    assert_close_in_float64(loss, expected_loss.detach())
    assert_close_in_float64(objective, expected_objective)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-12)

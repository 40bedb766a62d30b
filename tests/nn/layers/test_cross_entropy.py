"""The loss without all logits is the loss from the logits: value, gradients, ignored targets, precision, memory."""

import pytest
import torch
from torch import Tensor

from anlit.nn.layers import cross_entropy
from anlit.nn.layers.cross_entropy import IGNORE_INDEX, linear_cross_entropy
from tests.nn.models.tiny import ARCHITECTURES, next_token_loss, random_tokens, tiny

V, D = 37, 6


@pytest.fixture
def chunks_of_five(monkeypatch) -> None:
    """12 tokens are two chunks and a rest."""
    monkeypatch.setattr(cross_entropy, "chunk_size", lambda *_: 5)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in [(2, 6, D), (V, D)]
    )
    targets = torch.randint(V, (2, 6), generator=generator)
    targets[0, 2:4] = targets[1, 5] = IGNORE_INDEX
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(objective: Tensor, *tensors: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(objective, tensors))


@pytest.mark.parametrize(
    ("z_loss", "upstream", "compiled"), [(0.0, 1.0, False), (0.3, 0.25, False), (0.3, 1.0, True)]
)
def test_it_is_the_loss_of_the_logits(
    z_loss, upstream, compiled, chunks_of_five, monkeypatch
) -> None:
    traced = torch.compile(
        cross_entropy._chunk_losses, dynamic=False, backend="aot_eager"
    )  # without the compiler's kernels
    monkeypatch.setattr(cross_entropy, "_compiled_chunk_losses", lambda: traced)
    x, weight, targets = inputs()
    loss, objective = linear_cross_entropy(x, weight, targets, z_loss, compiled)
    ours = gradients(objective * upstream, x, weight)
    expected_loss, expected = next_token_loss(x @ weight.mT, targets, z_loss)
    torch.testing.assert_close((loss, objective), (expected_loss, expected), rtol=1e-12, atol=0)
    assert not loss.requires_grad
    torch.testing.assert_close(
        ours, gradients(expected * upstream, x, weight), rtol=1e-10, atol=1e-14
    )
    assert ours[0][0, 2:4].abs().max() == 0, "what is not counted gets no gradient"


def test_extreme_logits_and_no_target_at_all_stay_finite(chunks_of_five) -> None:
    x, weight, targets = inputs(torch.float32)
    loss, objective = linear_cross_entropy(x * 300, weight, targets)
    torch.testing.assert_close(
        loss, next_token_loss(x * 300 @ weight.mT, targets)[0], rtol=1e-6, atol=0
    )
    assert gradients(objective, x)[0].isfinite().all()
    loss, objective = linear_cross_entropy(x, weight, torch.full_like(targets, IGNORE_INDEX), 0.1)
    assert loss == objective == gradients(objective, x)[0].abs().max() == 0


def test_only_what_asks_for_a_gradient_gets_one_and_validation_keeps_nothing(
    chunks_of_five,
) -> None:
    x, weight, targets = inputs()
    linear_cross_entropy(x, weight.detach(), targets)[1].backward()
    assert x.grad is not None
    with torch.no_grad():
        loss, objective = linear_cross_entropy(x, weight, targets)
    assert objective.grad_fn is None
    torch.testing.assert_close(loss, next_token_loss(x @ weight.mT, targets)[0])


def test_autocast_computes_products_in_its_precision_and_the_rest_in_float32(
    chunks_of_five,
) -> None:
    x, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, objective = linear_cross_entropy(x, weight, targets)
        expected, _ = next_token_loss(x @ weight.mT, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    exact = inputs()
    theirs = gradients(next_token_loss(exact[0] @ exact[1].mT, targets)[1], *exact[:2])
    for mine, its in zip(gradients(objective, x, weight), theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - its).norm() < 2e-2 * its.norm()


@pytest.mark.parametrize(("device", "vocab_size", "width", "n_tokens", "expected"), [
    ("cpu", 1024, 64, 16_384, 1024), ("cpu", 50_304, 768, 16_384, 768), ("cuda", 1024, 64, 2**20, 2**17),
    *(("cuda", 50_304, 768, n, 2048) for n in (16_384, 2048, 65_536, 12_288)), ("cuda", 50_304, 768, 16_383, 2560),
])  # fmt: skip
def test_chunks_hold_a_bounded_number_of_logits_and_are_equal_on_a_gpu(
    device, vocab_size, width, n_tokens, expected
):
    """Where the number of tokens allows it; else they are multiples of 256, with a rest."""
    assert cross_entropy.chunk_size(device, vocab_size, width, n_tokens) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_is_the_loss_of_the_logits(compiled, monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_size", lambda *_: 256)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in [(3, 200, 64), (1000, 64)])
    targets = torch.randint(1000, (3, 200), generator=generator)
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    expected, _ = next_token_loss(exact[0] @ exact[1].mT, targets)
    ours = [x.cuda().requires_grad_(), weight.cuda().requires_grad_()]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss, objective = linear_cross_entropy(*ours, targets.cuda(), compiled=compiled)
    torch.testing.assert_close(loss.cpu().double(), expected.detach(), rtol=2e-3, atol=0)
    for mine, its in zip(gradients(objective, *ours), gradients(expected, *exact), strict=True):
        assert (mine.cpu().double() - its).norm() < 1e-2 * its.norm()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_asked_for_its_loss_gives_that_of_its_logits(architecture) -> None:
    model = tiny(architecture).model.double()
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=1)
    ours, theirs = (
        model(tokens, targets=targets, z_loss=0.2),
        next_token_loss(model(tokens), targets, 0.2),
    )
    torch.testing.assert_close(ours, (theirs[0].detach(), theirs[1]), rtol=1e-12, atol=0)
    mine, its = (gradients(objective, *model.parameters()) for _, objective in (ours, theirs))
    torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-12)

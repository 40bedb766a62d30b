"""Documents packed into one sequence get the logits and gradients that each has alone, if they are masked."""

import pytest
import torch

from anlit import DynamicNTK, NoPE, PRoPE, RoPE
from tests.attention.examples import SHIPPED
from tests.models.tiny import ARCHITECTURES, SIZE, jolt, random_tokens, tiny

LENGTHS = [[5, 1, 7], [1, 12], [13]]
IDS = torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in LENGTHS])
TOKENS = random_tokens(*IDS.shape)
PROBE = torch.randn(*IDS.shape, SIZE["vocab_size"], generator=torch.Generator().manual_seed(2)).double()
POSITIONS = {
    "rope": RoPE(fraction=0.5),
    "p-rope": PRoPE(),
    "nope": NoPE(),
    "dynamic ntk": DynamicNTK(training_length=TOKENS.shape[1]),
}
EACH = [(name, "rope") for name in SHIPPED] + [("log n", name) for name in POSITIONS if name != "rope"]


def documents() -> list[tuple[int, slice]]:
    """(row, positions) of every document."""
    ends = [torch.tensor(row).cumsum(0).tolist() for row in LENGTHS]
    return [
        (b, slice(end - length, end)) for b, row in enumerate(LENGTHS) for length, end in zip(row, ends[b], strict=True)
    ]


def run(model: torch.nn.Module, tokens: torch.Tensor, ids: torch.Tensor | None, probe: torch.Tensor):
    """Logits, and the gradients by name, of the probed sum of the logits."""
    model.zero_grad()
    logits = model(tokens, ids)
    (logits * probe).sum().backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mechanism", "positions"), EACH)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masked_documents_do_not_know_of_each_other(architecture, mechanism, positions) -> None:
    model = jolt(tiny(architecture, attention=SHIPPED[mechanism], positions=POSITIONS[positions]).double()).model
    logits, gradients = run(model, TOKENS, IDS, PROBE)
    summed = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for b, where in documents():
        alone, its_gradients = run(model, TOKENS[b : b + 1, where], None, PROBE[b : b + 1, where])
        close(logits[b, where], alone[0])
        for name, gradient in its_gradients.items():
            summed[name] += gradient
    for name, gradient in gradients.items():
        close(gradient, summed[name])


@pytest.mark.parametrize("mechanism", SHIPPED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_masking_they_do(architecture, mechanism) -> None:
    model = jolt(tiny(architecture, attention=SHIPPED[mechanism], document_masking=False).double()).model
    logits, gradients = run(model, TOKENS, IDS, PROBE)
    dense, dense_gradients = run(model, TOKENS, None, PROBE)
    close(logits, dense)
    for b, where in documents():
        alone = model(TOKENS[b : b + 1, where])[0]
        if where.start == 0:
            close(logits[b, where], alone)
        else:
            reach = (SHIPPED[mechanism].window or 100) - 1  # further on a window no longer reaches into the other
            assert (logits[b, where] - alone).abs().amax(-1)[:reach].min() > 1e-3
    model.document_masking = True
    _, masked_gradients = run(model, TOKENS, IDS, PROBE)
    for name, gradient in gradients.items():
        close(gradient, dense_gradients[name])
        if "stored" not in name:
            assert (gradient - masked_gradients[name]).abs().max() > 1e-3 * gradient.abs().max(), name

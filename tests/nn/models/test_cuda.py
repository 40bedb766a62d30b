"""On a CUDA device: the same numbers as on CPU, compiled too, without waiting.

Skips itself elsewhere.
"""

import pytest
import torch
from torch import Tensor

from anlit import Plain, Runtime, ScaleInvariant
from anlit.nn.layers.float8 import CAPABILITY, Float8Product
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import architectures, prepare_to_train, random_tokens, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mechanism", [Plain(), ScaleInvariant()], ids=["plain", "scale-invariant"])
@architectures
def test_cuda_equals_cpu_in_float64(architecture, mechanism) -> None:
    model = tiny(architecture, attention=mechanism).double()
    tokens = random_tokens(2, 12)
    row_of_ids = [0] * 5 + [1] * 7
    ids = torch.tensor([row_of_ids, row_of_ids])

    def logits_and_gradients(device: str) -> list[Tensor]:
        logits = model.to(device)(tokens.to(device), ids.to(device))
        objective = logits.square().sum()
        gradients = torch.autograd.grad(objective, list(model.parameters()))
        return [tensor.cpu() for tensor in (logits, *gradients)]

    on_cpu = logits_and_gradients("cpu")
    on_cuda = logits_and_gradients("cuda")

    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-9, atol=1e-9)


@architectures
def test_a_compiled_step_never_waits_and_gives_the_same(architecture) -> None:
    """Three steps of bf16 training, in which the host never reads a number from the device."""
    uncompiled = losses_without_waiting(architecture, compiles=False)
    compiled = losses_without_waiting(architecture, compiles=True)

    torch.testing.assert_close(compiled, uncompiled, rtol=2e-3, atol=2e-3)


def losses_without_waiting(architecture: type[LanguageModel], compiles: bool) -> Tensor:
    """The losses of three steps; torch raises if a step but the first waits for the device."""
    model = tiny(architecture, n_layers=2, vocab_size=512).cuda()
    decoder = model.model
    prepare_to_train(decoder, Runtime(compile=compiles), "cuda")
    optimizer = model.make_optimizer(parameter_groups(decoder))
    tokens = random_tokens(4, 64, seed=0, vocab_size=512).cuda()
    targets = random_tokens(4, 64, seed=1, vocab_size=512).cuda()
    losses = []
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # step 0 compiles
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss, objective = decoder(tokens, targets=targets)
            objective.backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            decoder.clip_qk()
            decoder.restore_norms()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_products_are_the_emulated_products(recipe) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        pytest.skip("this GPU does not have the products")
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128, dtype=torch.bfloat16)
    weight = torch.randn(256, 128, dtype=torch.bfloat16)

    def product_and_gradients(device: str) -> list[Tensor]:
        inputs = [x.to(device).requires_grad_(), weight.to(device).requires_grad_()]
        product = Float8Product(recipe, emulated=device == "cpu")
        y = product(*inputs)
        gradients = torch.autograd.grad(y.square().sum(), inputs)
        return [tensor.cpu() for tensor in (y, *gradients)]

    emulated = product_and_gradients("cpu")
    real = product_and_gradients("cuda")

    for actual, expected in zip(real, emulated, strict=True):
        atol = 2e-2 * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=atol)

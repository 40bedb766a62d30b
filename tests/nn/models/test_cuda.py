"""On a CUDA device: the same numbers as on CPU, compiled too, without waiting.

Skips itself elsewhere.
"""

import pytest
import torch

from anlit import Plain, Runtime, ScaleInvariant
from anlit.nn.layers.float8 import CAPABILITY, Float8Product
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import ARCHITECTURES, prepare_to_train, random_tokens, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "mechanism", [Plain(), ScaleInvariant()], ids=lambda mechanism: type(mechanism).__name__
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cuda_equals_cpu_in_float64(architecture, mechanism) -> None:
    model = tiny(architecture, attention=mechanism).double()
    tokens = random_tokens(2, 12)
    row_of_ids = [0] * 5 + [1] * 7
    ids = torch.tensor([row_of_ids, row_of_ids])
    results = []
    for device in ("cpu", "cuda"):
        logits = model.to(device)(tokens.to(device), ids.to(device))
        gradients = torch.autograd.grad(logits.square().sum(), [*model.parameters()])
        results.append([tensor.cpu() for tensor in (logits, *gradients)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_compiled_step_never_waits_and_gives_the_same(architecture) -> None:
    """Three steps of bf16 training, in which the host never reads a number from the device."""
    losses = []
    for compiles in (False, True):
        model = tiny(architecture, n_layers=2, vocab_size=512).cuda()
        decoder = model.model
        prepare_to_train(decoder, Runtime(compile=compiles), "cuda")
        optimizer = model.make_optimizer(parameter_groups(decoder))
        tokens = random_tokens(4, 64, seed=0, vocab_size=512).cuda()
        targets = random_tokens(4, 64, seed=1, vocab_size=512).cuda()
        losses_of_run = []
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
            losses_of_run.append(loss)
        losses.append(torch.stack(losses_of_run))
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_products_are_the_emulated_products(recipe) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY[recipe]:
        pytest.skip("this GPU does not have the products")
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128, dtype=torch.bfloat16)
    weight = torch.randn(256, 128, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device).requires_grad_(), weight.to(device).requires_grad_()]
        y = Float8Product(recipe, emulated=device == "cpu")(*inputs)
        gradients = torch.autograd.grad(y.square().sum(), inputs)
        results.append([y, *gradients])
    for emulated, real in zip(*results, strict=True):
        atol = 2e-2 * float(emulated.abs().max())
        torch.testing.assert_close(real.cpu(), emulated, rtol=2e-2, atol=atol)

"""The estimate of memory against the real allocations of a step."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import anlit
from anlit.sizing.estimate import estimate
from anlit.sizing.plan import Plan
from anlit.sizing.trace import step_memory
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups

ARCHITECTURES = ("GPT", "NGPT", "AnGPT")
SMALL = {
    "vocab_size": 512,
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 2,
    "context_length": 128,
}
DEEP = {
    "vocab_size": 256,
    "n_layers": 5,
    "d_model": 96,
    "n_heads": 3,
    "context_length": 64,
}
LARGE = {
    "vocab_size": 50304,
    "n_layers": 6,
    "d_model": 768,
    "n_heads": 12,
    "context_length": 1024,
}


def build(name: str, device: str = "cpu", **settings: object) -> Any:
    architecture = getattr(anlit, name)
    with torch.device(device):
        return architecture(**{**SMALL, "document_masking": False, **settings})


def estimated_peak(plan: Plan, name: str, **settings: object) -> int:
    model = build(name, "meta", **settings)
    return step_memory(model, plan).total()


def make_step(model: LanguageModel, autocast: bool) -> tuple[Callable[[], None], Any]:
    """A training step of 4 sequences in Lightning's order, and its optimizer."""
    decoder = model.model
    device = model.device.type
    optimizer = model.make_optimizer(parameter_groups(decoder))
    tokens = torch.randint(model.vocab_size, (4, model.context_length), device=device)
    targets = tokens.clone()
    ids = torch.zeros_like(tokens)
    precision = MixedPrecision("bf16-mixed", device) if autocast else Precision()

    def step() -> None:
        with precision.forward_context():
            _, loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def state_tensors(optimizer: Any) -> list[Tensor]:
    """The tensors of an optimizer's state. MuonAdamW has two optimizers."""
    tensors = []
    for member in getattr(optimizer, "_parts", [optimizer]):
        for state in member.state.values():
            tensors += filter(torch.is_tensor, state.values())
    return tensors


def peak_on_cpu(model: LanguageModel, autocast: bool) -> float:
    """The peak of a step in bytes: parameters, optimizer state and allocations."""
    step, optimizer = make_step(model, autocast)
    step()  # makes the optimizer's state and the tables of positions
    permanent = [*model.model.parameters(), *state_tensors(optimizer)]
    permanent_bytes = sum(tensor.untyped_storage().nbytes() for tensor in permanent)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in allocations]
    return float(permanent_bytes + max(accumulate(changes)))


@pytest.mark.parametrize(
    ("name", "shape", "kernel", "precision"),
    [
        pytest.param("GPT", DEEP, "eager", "bf16-mixed", id="GPT"),
        pytest.param("NGPT", DEEP, "eager", "32-true", id="nGPT in float32"),
        pytest.param("AnGPT", DEEP, "eager", "bf16-mixed", id="anGPT"),
        pytest.param("AnGPT", SMALL, "sdpa", "32-true", id="SDPA in float32"),
        pytest.param("NGPT", SMALL, "eager", "bf16-mixed", id="nGPT"),
    ],
)
def test_the_estimate_is_within_ten_percent_of_the_real_peak(
    name: str, shape: dict[str, int], kernel: str, precision: Any
) -> None:
    settings = {**shape, "kernel": kernel}
    plan = Plan(batch_size=4, length=shape["context_length"], precision=precision)

    estimated = estimated_peak(plan, name, **settings)

    real = peak_on_cpu(build(name, **settings), autocast=precision == "bf16-mixed")
    assert estimated == pytest.approx(real, rel=0.1)


def test_float64_is_counted_with_eight_bytes_and_without_fused_kernels() -> None:
    plan = Plan(batch_size=4, length=SMALL["context_length"], precision="64-true")

    estimated = estimated_peak(plan, "AnGPT")

    model = build("AnGPT", kernel="eager").double()
    real = peak_on_cpu(model, autocast=False)
    assert estimated == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_matrix_weight"), [(anlit.AdamW, 8), (anlit.MuonAdamW, 4)]
)
def test_the_optimizer_state_is_counted_by_its_tensors(
    optimizer: type, bytes_per_matrix_weight: int
) -> None:
    model = build("GPT", "meta", optimizer=optimizer)

    numbers = estimate(model, Plan(batch_size=1, length=128, precision="32-true"))

    n_matrix_weights = numbers["parameters"]["matrices"]
    n_vector_weights = numbers["parameters"]["total"] - n_matrix_weights
    expected = bytes_per_matrix_weight * n_matrix_weights + 8 * n_vector_weights
    # AdamW's step counters, and for a moment the temporary tensors of the step, are more.
    assert expected <= numbers["memory"]["optimizer state"] < 1.05 * expected


def memory_of(**changes: Any) -> dict[str, float]:
    """The memory of a plan in float32 by purpose, by default on a single GPU."""
    plan = Plan(batch_size=8, length=128, **changes)
    numbers = estimate(build("GPT", "meta"), plan)
    return numbers["memory"]


def test_fsdp_shards_parameters_and_state_and_gathers_two_blocks() -> None:
    decoder = build("GPT", "meta").model
    n_block = sum(parameter.numel() for parameter in decoder.blocks[0].parameters())
    n_outer = decoder.n_parameters() - 2 * n_block

    single = memory_of()
    quarter = memory_of(gpus=4, strategy="fsdp")

    for purpose in ("parameters", "optimizer state"):
        assert quarter[purpose] == pytest.approx(single[purpose] / 4, rel=1e-4)
    gathered = 8 * n_outer + 8 * n_block + 8 * n_block
    assert quarter["FSDP's gathered weights and gradients"] == gathered
    assert quarter["activations of the blocks"] == single["activations of the blocks"]


def test_all_gradients_live_at_the_peak_under_ddp_and_accumulation() -> None:
    all_gradients = 4 * build("GPT", "meta").model.n_parameters()

    single = memory_of()
    ddp = memory_of(gpus=4, strategy="ddp")
    accumulating = memory_of(accumulate=2)

    assert single.get("gradients", 0) < all_gradients
    assert ddp["gradients"] == all_gradients
    assert accumulating["gradients"] == all_gradients


def test_recomputed_blocks_save_less_than_half() -> None:
    blocks = "activations of the blocks"

    kept = memory_of()
    recomputed = memory_of(checkpoint_every=1)

    assert kept[blocks] > 2 * recomputed[blocks]


def test_recomputed_blocks_keep_no_casts_of_their_weights() -> None:
    """Of a model sharded over many GPUs, the casts of all blocks would not fit one of them."""
    plan = Plan(
        batch_size=1,
        length=128,
        gpus=1024,
        strategy="fsdp",
        precision="bf16-mixed",
        checkpoint_every=1,
    )

    few_blocks = estimate(build("GPT", "meta", n_layers=4), plan)
    many_blocks = estimate(build("GPT", "meta", n_layers=16), plan)

    copies = "copies of weights for computing"
    assert many_blocks["memory"][copies] == few_blocks["memory"][copies]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_estimate_is_within_ten_percent_of_a_gpus_peak(name: str) -> None:
    estimated = estimated_peak(Plan(batch_size=4, length=1024), name, **LARGE)

    step, _ = make_step(build(name, **LARGE).cuda(), autocast=True)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    real = torch.cuda.max_memory_allocated()
    assert estimated == pytest.approx(real, rel=0.1)

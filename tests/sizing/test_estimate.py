"""The estimate against what a step on the CPU really allocates, for each architecture and precision."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import anlit
from anlit.sizing.estimate import estimate
from anlit.sizing.plan import Plan
from anlit.sizing.trace import step_memory
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups

ARCHITECTURES = ("GPT", "NGPT", "AnGPT")
SMALL = {"vocab_size": 512, "n_layers": 2, "d_model": 64, "n_heads": 2, "context_length": 128}
DEEPER = {"vocab_size": 256, "n_layers": 5, "d_model": 96, "n_heads": 3, "context_length": 64}


def build(name: str, device: str = "cpu", **settings: object) -> Any:
    with torch.device(device):
        return getattr(anlit, name)(**{**SMALL, "document_masking": False, **settings})


def training(model: LanguageModel, autocast: bool) -> tuple[Callable[[], None], Any]:
    """One training step of 4 sequences in Lightning's order as a function, and its optimizer."""
    decoder, device = model.model, model.device.type
    optimizer = model.make_optimizer(parameter_groups(decoder))
    tokens = torch.randint(model.vocab_size, (4, model.context_length), device=device)
    targets, ids = tokens.clone(), torch.zeros_like(tokens)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def peak_on_cpu(model: LanguageModel, autocast: bool) -> float:
    """Peak bytes from the allocator's events: parameters, gradients, optimizer state and what the step allocates."""
    step, optimizer = training(model, autocast)
    step()  # makes the optimizer's state and the tables of positions
    states = [
        state for part in getattr(optimizer, "_parts", [optimizer]) for state in part.state.values()
    ]
    held = [
        *model.model.parameters(),
        *(x for state in states for x in state.values() if torch.is_tensor(x)),
    ]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda e: e.start_ns()))
    return float(sum(x.untyped_storage().nbytes() for x in held) + max(accumulate(changes)))


@pytest.mark.parametrize(("name", "shape", "kernel", "autocast"), [
    *((name, DEEPER, "eager", name != "NGPT") for name in ARCHITECTURES), ("AnGPT", SMALL, "sdpa", False),
    ("NGPT", SMALL, "eager", True),
])  # fmt: skip
def test_the_estimate_is_within_ten_percent_of_the_real_peak(name, shape, kernel, autocast) -> None:
    plan = Plan(
        batch_size=4,
        length=shape["context_length"],
        precision="bf16-mixed" if autocast else "32-true",
    )
    estimated = step_memory(build(name, "meta", **shape, kernel=kernel), plan).total()
    assert estimated == pytest.approx(
        peak_on_cpu(build(name, **shape, kernel=kernel), autocast), rel=0.1
    )


def test_float64_is_counted_with_eight_bytes_and_without_fused_kernels() -> None:
    plan = Plan(batch_size=4, length=SMALL["context_length"], precision="64-true")
    estimated = step_memory(build("AnGPT", "meta"), plan).total()
    assert estimated == pytest.approx(
        peak_on_cpu(build("AnGPT", kernel="eager").double(), False), rel=0.1
    )


def test_the_optimizers_state_is_what_the_optimizer_makes() -> None:
    for optimizer, bytes_per_matrix_weight in ((anlit.AdamW, 8), (anlit.MuonAdamW, 4)):
        model = build("GPT", "meta", optimizer=optimizer)
        sizes = estimate(model, Plan(batch_size=1, length=128, precision="32-true"))
        others = sizes["parameters"]["total"] - sizes["parameters"]["matrices"]
        expected = bytes_per_matrix_weight * sizes["parameters"]["matrices"] + 8 * others
        # beside it, AdamW's step counters, and for a moment what the step computes with
        assert expected <= sizes["memory"]["optimizer state"] < 1.05 * expected


def test_what_strategy_accumulation_and_recomputed_blocks_change() -> None:
    """Of float32 weights: DDP's buckets and gradients of earlier micro-batches are all there at the peak."""
    model = build("GPT", "meta")
    changes = ({}, {"gpus": 4, "strategy": "fsdp"}, {"gpus": 4, "strategy": "ddp"}, {"accumulate": 2},
               {"checkpoint_every": 1})  # fmt: skip
    plans = (Plan(batch_size=8, length=128, **more) for more in changes)
    whole, quarter, ddp, accumulated, recomputed = (
        estimate(model, plan)["memory"] for plan in plans
    )
    for part in ("parameters", "optimizer state"):
        assert quarter[part] == pytest.approx(whole[part] / 4, rel=1e-4)
    blocks, block = (
        "activations of the blocks",
        sum(p.numel() for p in model.model.blocks[0].parameters()),
    )
    assert quarter[blocks] == whole[blocks] > 2 * recomputed[blocks]
    n_parameters = model.model.n_parameters()
    assert (
        quarter["FSDP's gathered weights and gradients"]
        == 8 * (n_parameters - 2 * block) + 8 * block + 8 * block
    )
    assert (
        whole.get("gradients", 0) < 4 * n_parameters == ddp["gradients"] == accumulated["gradients"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_estimate_is_within_ten_percent_of_a_gpus_peak(name: str) -> None:
    settings = {
        "vocab_size": 50304,
        "n_layers": 6,
        "d_model": 768,
        "n_heads": 12,
        "context_length": 1024,
    }
    estimated = step_memory(
        build(name, "meta", **settings), Plan(batch_size=4, length=1024)
    ).total()
    step, _ = training(build(name, **settings).cuda(), True)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert estimated == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)

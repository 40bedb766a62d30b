"""The estimate against what a step on the CPU really allocates, for each architecture and precision."""

import pytest
import torch

import anlit
from anlit.models.language_model import LanguageModel
from anlit.sizing.estimate import Plan, estimate
from anlit.sizing.trace import Setting, step_memory, trace_step
from tests.sizing.measured import peak_on_cpu, peak_on_gpu

ARCHITECTURES = ("GPT", "NGPT", "AnGPT")
SMALL = {"vocab_size": 512, "n_layers": 2, "d_model": 64, "n_heads": 2, "context_length": 128}
DEEPER = {"vocab_size": 256, "n_layers": 5, "d_model": 96, "n_heads": 3, "context_length": 64}


def build(name: str, device: str = "cpu", **settings: object) -> LanguageModel:
    with torch.device(device):
        return getattr(anlit, name)(**settings)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [SMALL, DEEPER], ids=["small", "deeper"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_estimate_is_within_ten_percent_of_the_real_peak(name: str, shape: dict[str, int]) -> None:
    autocast = (name == "NGPT") == (shape is SMALL)  # every architecture in both precisions, without every pair
    settings = {**shape, "backend": "eager", "document_masking": False}
    estimated = step_memory(build(name, "meta", **settings), Setting(4, shape["context_length"], autocast)).total()
    measured = peak_on_cpu(build(name, **settings), 4, shape["context_length"], autocast)
    assert estimated == pytest.approx(measured, rel=0.1)


def test_a_fused_kernel_is_estimated_as_what_torch_keeps() -> None:
    settings = {**SMALL, "backend": "sdpa", "document_masking": False}
    estimated = step_memory(build("AnGPT", "meta", **settings), Setting(4, 128)).total()
    assert estimated == pytest.approx(peak_on_cpu(build("AnGPT", **settings), 4, 128, autocast=False), rel=0.1)


@pytest.mark.parametrize("recompute", [None, 2])
def test_two_shallow_models_give_the_deep_ones_peak(recompute: int | None) -> None:
    model = build("AnGPT", "meta", **SMALL | {"n_layers": 6})
    setting = Setting(2, 128, checkpoint_every=recompute)
    whole = max(phase.total() for phase in trace_step(model, 6, setting).values())
    assert step_memory(model, setting).total() == pytest.approx(whole, rel=1e-6)


def test_the_optimizers_state_is_what_the_optimizer_makes() -> None:
    for optimizer, bytes_per_matrix_weight in ((anlit.AdamW, 8), (anlit.MuonAdamW, 4)):
        with torch.device("meta"):
            model = anlit.GPT(**SMALL, optimizer=optimizer)
        sizes = estimate(model, Plan(batch_size=1, length=128, precision="32-true"))
        others = sizes.parameters["total"] - sizes.parameters["matrices"]
        expected = bytes_per_matrix_weight * sizes.parameters["matrices"] + 8 * others
        # beside it, AdamW's step counters, and for a moment what the step computes with
        assert expected <= sizes.memory["optimizer state"] < 1.05 * expected


def test_sharding_divides_what_it_shards() -> None:
    model = build("GPT", "meta", **SMALL | {"document_masking": False})
    one = estimate(model, Plan(batch_size=1, length=128)).memory
    four = estimate(model, Plan(batch_size=1, length=128, gpus=4, strategy="fsdp")).memory
    assert four["parameters"] == pytest.approx(one["parameters"] / 4, rel=1e-4)
    assert four["optimizer state"] == pytest.approx(one["optimizer state"] / 4, rel=1e-4)
    assert four["activations of the blocks"] == one["activations of the blocks"]
    assert "FSDP's gathered weights and gradients" in four


def test_recomputing_blocks_leaves_their_inputs_only() -> None:
    model = build("GPT", "meta", **SMALL)
    held = trace_step(model, 2, Setting(4, 128, checkpoint_every=1))["forward"]["blocks"]
    assert held == pytest.approx(2 * 4 * 128 * 64 * 4, rel=0.3)  # h (B, T, d), and little more


def test_days_follow_from_tokens_flops_and_gpus() -> None:
    model = build("GPT", "meta", **SMALL)
    sizes = estimate(model, Plan(gpus=8, strategy="ddp", gpu="A100", mfu=0.5, length=128, batch_size=1, tokens=1e12))
    assert sizes.days == pytest.approx(1e12 * sizes.flops_per_token / (8 * 312e12 * 0.5) / 86_400)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_estimate_is_within_ten_percent_of_a_gpus_peak(name: str) -> None:
    settings = {"vocab_size": 50304, "n_layers": 6, "d_model": 768, "n_heads": 12, "document_masking": False}
    estimated = step_memory(build(name, "meta", **settings), Setting(4, 1024, autocast=True)).total()
    measured = peak_on_gpu(build(name, **settings), 4, 1024)
    print(f"{name}: estimated {estimated / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB")
    assert estimated == pytest.approx(measured, rel=0.1)

"""A training step's real peak on the CPU, from the allocator's own events: the other way to learn what sizing says."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import parameter_groups


def peak_on_cpu(model: LanguageModel, batch_size: int, length: int, autocast: bool) -> float:
    """Peak bytes of a step in Lightning's order: parameters, gradients, optimizer state and what the step allocates."""
    step, optimizer = _training(model, batch_size, length, autocast, "cpu")
    step()  # makes the optimizer's state and the tables of positions
    held = sum(p.untyped_storage().nbytes() for p in model.model.parameters())
    for state in _states(optimizer):
        held += sum(x.untyped_storage().nbytes() for x in state.values() if isinstance(x, torch.Tensor))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return float(held + peak)


def peak_on_gpu(model: LanguageModel, batch_size: int, length: int) -> float:
    """The same by torch.cuda.max_memory_allocated, under bf16 autocast."""
    step, _ = _training(model.cuda(), batch_size, length, True, "cuda")
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return float(torch.cuda.max_memory_allocated())


def _training(
    model: LanguageModel, batch_size: int, length: int, autocast: bool, device: str
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """One training step as a function, and its optimizer."""
    decoder = model.model
    optimizer = model.make_optimizer(parameter_groups(decoder))
    tokens = torch.randint(model.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    targets, ids = tokens.clone(), torch.zeros_like(tokens)

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = decoder(tokens, ids, targets=targets, z_loss=model.z_loss)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    parts = getattr(optimizer, "_parts", [optimizer])
    return [state for part in parts for state in part.state.values()]

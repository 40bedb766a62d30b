"""The norms that nGPT fixes and anGPT bounds, after real steps of a real Trainer with gradient accumulation."""

import pytest
import torch

from anlit import GPT, NGPT, AnGPT, MuonAdamW
from anlit.models.language_model import LanguageModel
from tests.models.tiny import CONSTANT, adamw, fit, tiny

STEPS, ACCUMULATE = 20, 2
OPTIMIZERS = {
    "adamw": adamw(lr=0.05),
    "muon": lambda groups: MuonAdamW(groups, lr=0.1, embedding_lr=0.1, head_lr=0.05, vector_lr=0.01),
}
constrained = pytest.mark.parametrize("architecture", [NGPT, AnGPT])


def norms(model: LanguageModel) -> torch.Tensor:
    """Of every constrained vector, worked out from the names: (vectors,), float64."""
    vectors = []
    for name, parameter in model.model.named_parameters():
        if name.endswith("weight"):
            columns = isinstance(model, NGPT) and name.endswith(("W_o.weight", "W_d.weight"))
            vectors.append(parameter.detach().double().norm(dim=0 if columns else 1))
    assert len(vectors) == 2 + 7 * len(model.model.blocks)
    return torch.cat(vectors)


SHARED_KEYS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 12}


@pytest.mark.parametrize(("optimizer", "heads"), [("adamw", {}), ("muon", SHARED_KEYS)])
@pytest.mark.parametrize("constraint", ["strict", "bounded"])
@constrained
def test_norms_hold_after_training(architecture, constraint, optimizer, heads) -> None:
    """Strict norms are the default of nGPT, bounded ones of anGPT."""
    settings = {"optimizer": OPTIMIZERS[optimizer], "schedule": CONSTANT, "norms": constraint, **heads}
    before, model = tiny(architecture, **settings), tiny(architecture, **settings)
    assert (norms(before) - 1).abs().max() < 1e-6
    fit(model, STEPS, accumulate=ACCUMULATE)
    assert norms(model).max() <= 1 + 1e-6
    assert (norms(model).min() >= 1 - 1e-6) == (constraint == "strict")
    assert constraint == "strict" or norms(model).min() < 0.99, "a bound is not a fixed norm"
    assert (model.model.blocks[0].W_q.weight - before.model.blocks[0].W_q.weight).abs().max() > 0.1


def test_norms_are_restored_once_per_optimizer_step(monkeypatch) -> None:
    model, events = tiny(GPT), []
    step = model.training_step
    monkeypatch.setattr(model, "training_step", lambda *args: events.append("batch") or step(*args))
    monkeypatch.setattr(type(model.model), "restore_norms", lambda self: events.append("norms"))
    fit(model, max_steps=3, accumulate=3)
    assert events == ["batch", "batch", "batch", "norms"] * 3


@constrained
def test_row_norms_report_every_constrained_vector(architecture) -> None:
    model = tiny(architecture)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1 + torch.rand_like(parameter))
    reported = torch.cat(list(model.model.row_norms())).double()
    torch.testing.assert_close(reported, norms(model), rtol=1e-6, atol=0)
    model.model.restore_norms()
    assert norms(model).max() <= 1 + 1e-6

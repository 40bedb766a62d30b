"""All architectures: initial values, norms after real steps of a real Trainer, half precision."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from anlit import GPT, NGPT, AdamW, AnGPT, MuonAdamW
from anlit.nn.layers.scaling import ScalingVector
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import parameter_groups
from tests.nn.models.tiny import CONSTANT, adamw, architectures, fit, is_normalised, jolt, tiny

constrained = pytest.mark.parametrize("architecture", [NGPT, AnGPT])


def vectors(model: LanguageModel) -> dict[str, Tensor]:
    """Each matrix with its constrained vectors as rows, worked out from the names, in float64."""
    matrices_of_columns = ("W_o.weight", "W_d.weight") if isinstance(model, NGPT) else ()
    vectors_by_matrix = {}
    for name, weight in model.model.named_parameters():
        if weight.dim() == 2:
            matrix = weight.detach().double()
            has_columns = name.endswith(matrices_of_columns)
            vectors_by_matrix[name] = matrix.T if has_columns else matrix
    assert len(vectors_by_matrix) == 2 + 7 * len(model.model.blocks)
    return vectors_by_matrix


def norms(model: LanguageModel) -> Tensor:
    norms_of_matrices = []
    for rows in vectors(model).values():
        norms_of_matrices.append(rows.norm(dim=1))
    return torch.cat(norms_of_matrices)


def test_initial_values_of_gpt() -> None:
    n_layers = 8
    model = tiny(GPT, n_layers=n_layers, d_model=64, vocab_size=500).model

    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        is_residual = name.endswith(("W_o.weight", "W_d.weight"))
        expected = 0.02 / math.sqrt(2 * n_layers) if is_residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        standard_error = expected / math.sqrt(parameter.numel())
        assert parameter.mean().abs().item() < 4 * standard_error, name


SHARED_KEYS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 24}


@pytest.mark.parametrize("heads", [{}, SHARED_KEYS], ids=["alike", "shared keys"])
@constrained
def test_initial_vectors_point_anywhere_and_have_norm_one(architecture, heads) -> None:
    model = tiny(architecture, d_model=64, vocab_size=300, **heads)

    for name, rows in vectors(model).items():
        width = rows.shape[1]
        deviations = rows.norm(dim=1) - 1
        normal_entries = math.sqrt(width) * rows
        standard_error = 1 / math.sqrt(rows.numel())
        fourth_moment = normal_entries.pow(4).mean().item()
        assert deviations.abs().max() < 1e-6, name
        assert normal_entries.mean().abs() < 4 * standard_error
        assert fourth_moment == pytest.approx(3, rel=0.15), f"{name}: not Gaussian directions"


ROOT = 1 / math.sqrt(64)
SCALING_VECTORS = {
    NGPT: {
        "alpha_A": (0.05, ROOT),
        "alpha_M": (0.05, ROOT),
        "s_qk": (1.0, ROOT),
        "s_u": (1.0, 1.0),
        "s_v": (1.0, 1.0),
        "s_z": (1.0, ROOT),
    },
    AnGPT: {
        "alpha_A": (1 / 10, ROOT),
        "alpha_M": (1 / 10, ROOT),
        "s_z": (1.0, ROOT),
    },
}
"""The initial values and scales, with d_model 64 and 5 layers."""


@pytest.mark.parametrize(("architecture", "expected"), SCALING_VECTORS.items())
def test_initial_values_and_scales_of_the_scaling_vectors(architecture, expected) -> None:
    model = tiny(architecture, d_model=64, n_layers=5).model

    scaling = {}
    for path, module in model.named_modules():
        if isinstance(module, ScalingVector):
            _, _, name = path.rpartition(".")
            scaling[name] = module

    assert scaling.keys() == expected.keys()
    for name, (init, scale) in expected.items():
        value = scaling[name]().detach()
        stored = scaling[name].stored.detach()
        torch.testing.assert_close(value, torch.full_like(value, init))
        torch.testing.assert_close(stored, torch.full_like(stored, scale))


@pytest.mark.parametrize(
    ("d_model", "rate"),
    [
        (256, 1 / 256),
        (32, 0.016),
    ],
)
@architectures
def test_settings_that_are_null_follow_the_size(architecture, d_model: int, rate: float) -> None:
    """As in the shipped model/*.yaml."""
    nulls = {"alpha_init": None, "s_z_init": None} if is_normalised(architecture) else {}
    model = tiny(architecture, d_model=d_model, n_layers=5, vocab_size=500, **nulls).model
    optimizer = AdamW(parameter_groups(model), lr=None)

    assert {group["lr"] for group in optimizer.param_groups} == {rate}
    if nulls:
        alpha_sum = 1 / 2 if architecture is AnGPT else 1
        assert model.blocks[0].alpha_A.init == alpha_sum / 5
        assert model.s_z.init == math.sqrt(d_model)


MUON = partial(MuonAdamW, lr=0.1, embedding_lr=0.1, head_lr=0.05, vector_lr=0.01)
HEADS = {"n_heads": 4, "n_kv_heads": 2, "d_head": 12}


@pytest.mark.parametrize(
    ("optimizer", "heads"),
    [
        (adamw(lr=0.05), {}),
        (MUON, HEADS),
    ],
    ids=["adamw", "muon"],
)
@pytest.mark.parametrize("constraint", ["strict", "bounded"])
@constrained
def test_norms_hold_after_training(architecture, constraint, optimizer, heads) -> None:
    """Strict norms are the default of nGPT, bounded norms of anGPT."""
    settings = {"optimizer": optimizer, "schedule": CONSTANT, "norms": constraint, **heads}
    model = tiny(architecture, **settings)
    W_q = model.model.blocks[0].W_q.weight
    initial = W_q.detach().clone()

    fit(model, 20, accumulate=2)

    all_norms = norms(model)
    assert all_norms.max() <= 1 + 1e-6
    if constraint == "strict":
        assert all_norms.min() >= 1 - 1e-6
    else:
        assert all_norms.min() < 0.99, "a bound is not a fixed norm"
    change = W_q - initial
    assert change.abs().max() > 0.1


def test_norms_are_restored_once_per_optimizer_step(monkeypatch) -> None:
    model = tiny(GPT)
    original_step = model.training_step
    events = []

    def step(*arguments):
        events.append("batch")
        return original_step(*arguments)

    monkeypatch.setattr(model, "training_step", step)
    monkeypatch.setattr(type(model.model), "restore_norms", lambda self: events.append("norms"))

    fit(model, max_steps=3, accumulate=3)

    assert events == ["batch", "batch", "batch", "norms"] * 3


@constrained
def test_row_norms_report_every_constrained_vector(architecture) -> None:
    model = jolt(tiny(architecture))

    reported = torch.cat([*model.model.row_norms()]).double()

    torch.testing.assert_close(reported, norms(model), rtol=1e-6, atol=0)

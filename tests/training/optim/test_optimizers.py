"""Parameter groups, and Muon beside AdamW as one optimizer."""

import copy
import io
from itertools import chain

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from anlit import GPT, AdamW, AnGPT, LogN, MuonAdamW
from anlit.errors import UserError
from anlit.training.optim.optimizers import parameter_groups
from anlit.training.optim.schedule import Cosine
from tests.nn.models.tiny import ARCHITECTURES, architectures, random_tokens, tiny

TOKENS = random_tokens(2, 12)


@architectures
def test_every_parameter_is_in_one_group_by_its_role(architecture) -> None:
    model = tiny(architecture, attention=LogN(), attention_gate="per_head").model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        group["name"]: [names[id(weight)] for weight in group["params"]]
        for group in parameter_groups(model)
    }
    assert list(groups) == ["matrices", "embedding", "head", "vectors"]
    assert sorted(chain(*groups.values())) == sorted(names.values())
    assert (groups["embedding"], groups["head"]) == (["embedding.weight"], ["head.weight"])
    maps = [*(f"W_{letter}" for letter in "qkvouzd"), "output.W_g"]
    assert set(groups["matrices"]) == {
        f"blocks.{layer}.{name}.weight" for layer in range(2) for name in maps
    }
    assert "blocks.1.attention.mechanism.strength.value" in groups["vectors"]


@architectures
def test_decay_shrinks_matrices_and_leaves_vectors(architecture) -> None:
    model = tiny(architecture).model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = AdamW(parameter_groups(model), lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(
            parameter.detach(), factor * before[name], msg=lambda m, n=name: f"{n}: {m}"
        )


def test_settings_of_the_comparison_are_the_defaults() -> None:
    for architecture in ARCHITECTURES:
        model = tiny(architecture)
        for group in model.make_optimizer(parameter_groups(model.model)).param_groups:
            decay = 0.1 if architecture is GPT and group["name"] != "vectors" else 0.0
            assert (group["betas"], group["eps"], group["weight_decay"]) == (
                (0.9, 0.95),
                1e-9,
                decay,
            )
        warmup = 0.2 if architecture is GPT else 0.0
        assert type(model.schedule) is Cosine
        assert vars(model.schedule) == {"warmup": warmup, "final": 0.01}


@pytest.mark.parametrize(
    "groups", [[torch.nn.Linear(2, 3).weight], [{"params": [torch.nn.Linear(2, 3).weight]}]]
)
def test_a_rate_that_follows_the_size_needs_the_group_of_the_head(groups) -> None:
    with pytest.raises(
        UserError, match=r"lr=None follows the width of the group named head.*: give lr a number"
    ):
        AdamW(groups, lr=None)
    assert AdamW(groups, lr=0.1).param_groups[0]["lr"] == 0.1


RATES = {"lr": 0.02, "embedding_lr": 0.03, "head_lr": 0.004, "vector_lr": 0.005}


def steps(
    model, optimizers: list[torch.optim.Optimizer], schedulers: list[LambdaLR], n: int = 3
) -> None:
    for _ in range(n):
        model.zero_grad()
        model(TOKENS).square().mean().backward()
        for part in (*optimizers, *schedulers):
            part.step()


def decaying(optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_matrices_are_steered_by_muon_and_the_rest_by_adamw_on_one_schedule(adjust_lr_fn) -> None:
    model = tiny(AnGPT).double().model
    reference = copy.deepcopy(model)
    ours = MuonAdamW(
        parameter_groups(model), **RATES, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn
    )
    groups = {group["name"]: group["params"] for group in parameter_groups(reference)}
    muon = torch.optim.Muon(
        groups["matrices"], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn
    )
    rates = {"embedding": (0.03, 0.1), "head": (0.004, 0.1), "vectors": (0.005, 0.0)}
    others = [torch.optim.AdamW(groups[name], lr=lr, weight_decay=decay, betas=(0.9, 0.95), eps=1e-9)
              for name, (lr, decay) in rates.items()]  # fmt: skip
    for network, optimizers in [(model, [ours]), (reference, [muon, *others])]:
        steps(network, optimizers, [decaying(optimizer) for optimizer in optimizers])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-6, atol=1e-6)


@architectures
def test_a_saved_run_continues_as_if_it_had_not_stopped(architecture) -> None:
    model = tiny(architecture).model
    optimizer = MuonAdamW(parameter_groups(model), **RATES)
    scheduler = decaying(optimizer)
    steps(model, [optimizer], [scheduler])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, scheduler)], file)
    steps(model, [optimizer], [scheduler])

    resumed = tiny(architecture, seed=5).model
    again = MuonAdamW(parameter_groups(resumed), **dict.fromkeys(RATES, 1.0))
    schedule = decaying(again)
    file.seek(0)
    for part, state in zip((resumed, again, schedule), torch.load(file), strict=True):
        part.load_state_dict(state)
    steps(resumed, [again], [schedule])
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert [group["lr"] for group in again.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]

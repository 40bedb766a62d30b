"""Parameter groups, and Muon beside AdamW as one optimizer."""

import copy
import io

import pytest
import torch

from anlit import GPT, AdamW, AnGPT, LogN, MuonAdamW
from anlit.errors import UserError
from anlit.models.language_model import LanguageModel
from anlit.optim.optimizers import parameter_groups
from anlit.optim.schedule import Schedule
from tests.models.tiny import ARCHITECTURES, random_tokens, tiny

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
TOKENS = random_tokens(2, 12)


def names_by_group(model: LanguageModel) -> dict[str, set[str]]:
    names = {id(parameter): name for name, parameter in model.model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in parameter_groups(model.model)}


@architectures
def test_every_parameter_is_in_one_group_by_its_role(architecture) -> None:
    model = tiny(architecture, attention=LogN(), attention_gate="per_head")
    groups = names_by_group(model)
    assert list(groups) == ["matrices", "embedding", "head", "vectors"]
    assert sum(map(len, groups.values())) == len(list(model.parameters()))
    assert set().union(*groups.values()) == {name for name, _ in model.model.named_parameters()}
    assert groups["embedding"] == {"embedding.weight"}
    assert groups["head"] == {"head.weight"}
    expected = {f"blocks.{i}.W_{name}.weight" for i in range(2) for name in "qkvouzd"}
    assert groups["matrices"] == expected | {f"blocks.{i}.output.W_g.weight" for i in range(2)}
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
        torch.testing.assert_close(parameter.detach(), factor * before[name], msg=lambda m, n=name: f"{n}: {m}")


def test_settings_of_the_comparison_are_the_defaults() -> None:
    for architecture in ARCHITECTURES:
        model = tiny(architecture)
        groups = model.make_optimizer(parameter_groups(model.model)).param_groups
        for group in groups:
            decay = 0.1 if architecture is GPT and group["name"] != "vectors" else 0.0
            assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-9, decay)
        assert model.schedule == Schedule(warmup=0.2 if architecture is GPT else 0.0, final=0.01)


@pytest.mark.parametrize("groups", [[torch.nn.Linear(2, 3).weight], [{"params": [torch.nn.Linear(2, 3).weight]}]])
def test_a_rate_that_follows_the_size_needs_the_group_of_the_head(groups) -> None:
    with pytest.raises(UserError, match=r"lr=None follows the width of the group named head.*: give lr a number"):
        AdamW(groups, lr=None)
    assert AdamW(groups, lr=0.1).param_groups[0]["lr"] == 0.1


RATES = {"lr": 0.02, "embedding_lr": 0.03, "head_lr": 0.004, "vector_lr": 0.005}


def steps(model, optimizer, scheduler, n: int) -> None:
    for _ in range(n):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
        scheduler.step()


def decaying(optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_matrices_are_steered_by_muon_and_the_rest_by_adamw(adjust_lr_fn) -> None:
    model = tiny(AnGPT).double().model
    reference = copy.deepcopy(model)
    ours = MuonAdamW(parameter_groups(model), **RATES, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn)
    groups = {group["name"]: group["params"] for group in parameter_groups(reference)}
    muon = torch.optim.Muon(groups["matrices"], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn=adjust_lr_fn)
    settings = {"betas": (0.9, 0.95), "eps": 1e-9}
    others = [
        torch.optim.AdamW(groups["embedding"], lr=0.03, weight_decay=0.1, **settings),
        torch.optim.AdamW(groups["head"], lr=0.004, weight_decay=0.1, **settings),
        torch.optim.AdamW(groups["vectors"], lr=0.005, weight_decay=0.0, **settings),
    ]
    for _ in range(3):
        for network, optimizers in [(model, [ours]), (reference, [muon, *others])]:
            network.zero_grad()
            network(TOKENS).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for name, weight in weights(reference).items():
        torch.testing.assert_close(
            weights(model)[name], weight, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_schedule_reaches_both_parts() -> None:
    optimizer = MuonAdamW(parameter_groups(tiny(AnGPT).model), **RATES)
    scheduler = decaying(optimizer)
    optimizer.step()
    scheduler.step()
    rates = {group["name"]: group["lr"] for part in optimizer._parts for group in part.param_groups}
    expected = {"matrices": 0.01, "embedding": 0.015, "head": 0.002, "vectors": 0.0025}
    assert rates == pytest.approx(expected)
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == rates


@architectures
def test_a_saved_run_continues_as_if_it_had_not_stopped(architecture) -> None:
    model = tiny(architecture).model
    optimizer = MuonAdamW(parameter_groups(model), **RATES)
    scheduler = decaying(optimizer)
    steps(model, optimizer, scheduler, 3)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, scheduler)], file)
    steps(model, optimizer, scheduler, 3)

    resumed = tiny(architecture, seed=5).model
    again = MuonAdamW(parameter_groups(resumed), **dict.fromkeys(RATES, 1.0))
    schedule = decaying(again)
    file.seek(0)
    for part, state in zip((resumed, again, schedule), torch.load(file), strict=True):
        part.load_state_dict(state)
    steps(resumed, again, schedule, 3)
    for name, weight in weights(model).items():
        assert torch.equal(weights(resumed)[name], weight), name
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]

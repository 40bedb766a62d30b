"""A model and a default setting can be pickled, as for Ray, `ddp_spawn` and data workers."""

import copy
import inspect
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch

from anlit import GPT, AdamW, MuonAdamW, RoPE
from anlit.nn.models.runtime import Runtime
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import OptimizerFactory, parameter_groups
from anlit.training.optim.schedule import Constant
from tests.data.modules import quiet_trainer
from tests.integration.users_data import Collated
from tests.nn.attention.kernels import MECHANISMS
from tests.nn.models.tiny import architectures, fit, random_tokens, tiny


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Sketch(GPT):
    """A user's model with a default optimizer of its own."""

    def __init__(
        self,
        optimizer: OptimizerFactory = lambda groups: MuonAdamW(groups, lr=0.03),
        **settings: Any,
    ) -> None:
        super().__init__(optimizer, **settings)


def assert_same(model: LanguageModel, copied: LanguageModel) -> None:
    """Both compute the same logits, and make the same optimizer."""
    tokens = random_tokens(2, 16)
    assert torch.equal(copied(tokens), model(tokens))
    optimizers = []
    for each_model in (model, copied):
        optimizers.append(each_model.make_optimizer(parameter_groups(each_model.model)))
    assert type(optimizers[1]) is type(optimizers[0])
    assert optimizers[1].defaults == optimizers[0].defaults
    assert copied.schedule.factor(3, 10) == model.schedule.factor(3, 10)


@pytest.mark.parametrize("copy_of", [pickled, copy.deepcopy])
@architectures
def test_a_model_can_be_copied_before_and_after_training(architecture: Any, copy_of: Any) -> None:
    model = tiny(architecture)
    assert_same(model, copy_of(model))

    fit(model, max_steps=2)

    assert_same(model, copy_of(model))


@pytest.mark.parametrize("copy_of", [pickled, copy.deepcopy])
@pytest.mark.parametrize("recompute_every", [0, 1])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_copy_of_a_prepared_model_computes_with_its_own_weights(
    compiles: bool, recompute_every: int, copy_of: Any
) -> None:
    model = tiny(GPT, runtime=Runtime(compile=compiles, recompute_every=recompute_every))
    model.runtime.prepare(model.model, "cpu")
    model.runtime.wrap_blocks(model.model, "cpu", compiles)
    copied = copy_of(model)
    tokens = random_tokens(2, 16)
    expected = model(tokens)

    with torch.no_grad():
        for weight in model.model.blocks.parameters():
            weight.mul_(3)

    torch.testing.assert_close(copied(tokens), expected)
    wraps = ["forward" in vars(block) for block in copied.model.blocks]
    assert wraps == [compiles or recompute_every > 0] * len(wraps), "it stays prepared"


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_model_with_any_mechanism_can_be_pickled(name: str) -> None:
    model = tiny(GPT, attention=copy.deepcopy(MECHANISMS[name]), positions=RoPE(fraction=0.5))

    assert_same(model, pickled(model))


def fast_adamw(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return AdamW(groups, lr=0.5)


@pytest.mark.parametrize("optimizer", [fast_adamw, partial(AdamW, lr=0.5), torch.optim.SGD])
def test_a_users_optimizer_is_pickled_if_it_has_a_name(optimizer: Any) -> None:
    model = tiny(GPT, optimizer=optimizer, schedule=Constant(), lr_factors={"head": 2.0})

    assert_same(model, pickled(model))


def test_the_default_optimizer_of_a_users_class_is_pickled() -> None:
    model = tiny(Sketch)

    assert_same(model, pickled(model))
    assert isinstance(model.make_optimizer(parameter_groups(model.model)), MuonAdamW)


def test_a_default_setting_is_pickled_as_its_real_object() -> None:
    default = inspect.signature(GPT).parameters["schedule"].default

    real = pickled(default)

    assert type(real).__name__ == "Cosine"
    assert real.warmup == 0.2
    assert copy.deepcopy(default) is default, "a copy of a parser's defaults keeps its class"


class Pickles(L.Callback):
    """Pickles the Trainer within a step, as a data worker that is spawned gets it."""

    size = 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.size = len(pickle.dumps(trainer))


def test_a_trainer_of_the_user_can_be_pickled_within_a_step() -> None:
    probe = Pickles()
    trainer = quiet_trainer(max_steps=2, limit_val_batches=0, callbacks=[probe])

    trainer.fit(tiny(GPT, vocab_size=64), Collated(num_workers=0))

    assert probe.size > 0

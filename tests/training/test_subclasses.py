"""Models of another package: subclasses that a user writes, trained and read again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anlit
from anlit.cli import main
from anlit.errors import UserError
from anlit.nn.attention.attention import Attention
from anlit.nn.models.gpt import GPTBlock, GPTDecoder
from anlit.training.optim.optimizers import parameter_groups
from tests.data.modules import quiet_trainer
from tests.nn.models.tiny import SIZE, adamw, batches, fit, random_tokens, tiny


class ParallelBlock(GPTBlock):
    def forward(self, h: Tensor, documents: Any, rotation: Any) -> Tensor:
        x = self.norm_1(h)
        return h + self.attend(x, documents, rotation) + self.mlp(x)


class ParallelDecoder(GPTDecoder):
    block_class = ParallelBlock


class Parallel(anlit.GPT):
    """Has the weights of anlit's class, and computes something else."""

    decoder_class = ParallelDecoder


@pytest.fixture
def same_name() -> Iterator[None]:
    """`Parallel` is called GPT, in one test only: `--model GPT` of other tests is anlit's."""
    Parallel.__name__ = Parallel.__qualname__ = "GPT"
    yield
    Parallel.__name__ = Parallel.__qualname__ = "Parallel"


class Wide(anlit.GPT):
    """Has arguments of its own, and fixes others."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(**{**SIZE, "d_model": width})


class Shallow(anlit.GPT):
    """Fixes one argument, and hands on the others."""

    def __init__(self, scale: float = 1.0, **settings: Any) -> None:
        super().__init__(n_layers=1, attention=anlit.ScaleInvariant(), **settings)
        self.scale = scale


class Auxiliary(anlit.GPT):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.auxiliary = nn.Linear(2, 3)


def trained_and_saved(model: anlit.GPT, path: Path) -> anlit.GPT:
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(model, batches(8, model.context_length))
    trainer.save_checkpoint(path)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: tiny(Parallel), id="the name of anlit's"),
        pytest.param(lambda: Wide(width=32), id="own arguments"),
        pytest.param(
            lambda: Shallow(2.0, vocab_size=29, context_length=16, n_heads=2, d_model=32),
            id="own and anlit's arguments",
        ),
    ],
)
@pytest.mark.usefixtures("same_name")
def test_a_checkpoint_of_a_subclass_gives_the_same_model(model: Any, tmp_path: Path) -> None:
    trained = trained_and_saved(model(), tmp_path / "own.ckpt")

    loaded = anlit.load_checkpoint(str(tmp_path / "own.ckpt"), "cpu").model

    tokens = random_tokens(2, 16)
    assert type(loaded) is type(trained)
    assert loaded(tokens).equal(trained(tokens))
    assert getattr(loaded, "scale", None) == getattr(trained, "scale", None)


@pytest.mark.usefixtures("same_name")
def test_a_subclass_is_no_class_of_anlit_of_the_same_name(tmp_path: Path) -> None:
    own_file = tmp_path / "own.ckpt"
    anlit_file = tmp_path / "anlit.ckpt"
    trained_and_saved(tiny(Parallel), own_file)
    trained = trained_and_saved(tiny(anlit.GPT), anlit_file)

    loaded = anlit.load_checkpoint(str(anlit_file), "cpu")

    assert loaded.model(random_tokens(2, 16)).equal(trained(random_tokens(2, 16)))
    assert loaded.label == "GPT+, plain"
    assert anlit.load_checkpoint(str(own_file), "cpu").label == "GPT, plain"
    with pytest.raises(UserError, match=r"holds tests\.\S+\.GPT, but the configuration's model is"):
        quiet_trainer(max_steps=3).fit(tiny(anlit.GPT), batches(8, 16), ckpt_path=own_file)


@pytest.mark.usefixtures("same_name")
def test_a_subclass_with_the_name_of_anlits_is_not_exported_as_anlits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_and_saved(tiny(Parallel), tmp_path / "own.ckpt")
    export = ["export", str(tmp_path / "own.ckpt"), "--output", str(tmp_path / "out")]

    assert main([*export, "--format", "huggingface"]) == 2

    assert f"cannot hold the architecture {__name__}.GPT" in capsys.readouterr().err


def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return self.loss_of(batch)[1]


def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("val/loss", self.loss_of(batch)[0])


def configure_optimizers(self: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(self.parameters())


def optimizer_step(self: Any, *_: Any, optimizer_closure: Any) -> None:
    self.trainer.optimizers[0].step(optimizer_closure)


def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["own"] = 1


@pytest.mark.parametrize(
    "hook",
    [training_step, validation_step, configure_optimizers, optimizer_step, on_save_checkpoint],
)
def test_a_hook_that_does_not_call_anlits_is_refused(hook: Any) -> None:
    mixin = type("Mixin", (), {hook.__name__: hook})
    own = type("Own", (mixin, anlit.NGPT), {})

    name = hook.__name__
    with pytest.raises(UserError, match=rf"Mixin\.{name} replaces .* call super\(\)\.{name}"):
        tiny(own)


def test_a_hook_that_calls_anlits_is_taken() -> None:
    class Own(anlit.GPT):
        def on_train_start(self) -> None:
            super().on_train_start()
            self.began = True

        def loss_of(self, batch: Any, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
            loss, objective = super().loss_of(batch, z_loss)
            return loss, 0 * objective

    model: Any = tiny(Own, optimizer=adamw(lr=0.1))
    before = model.model.head.weight.detach().clone()

    fit(model, max_steps=1)

    assert model.began
    assert model.model.head.weight.equal(before)  # loss_of gives the objective


def undocumented(function: Any) -> Any:
    """A decorator without functools.wraps."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


class ByHelper(anlit.GPT):
    def training_step(self, *arguments: Any) -> Any:
        return self.timed_step(*arguments)

    def timed_step(self, *arguments: Any) -> Any:
        return super().training_step(*arguments)


class ByInnerFunction(anlit.GPT):
    def training_step(self, *arguments: Any) -> Any:
        def step() -> Any:
            return super(ByInnerFunction, self).training_step(*arguments)

        return step()


class Decorated(anlit.GPT):
    @undocumented
    def training_step(self, *arguments: Any) -> Any:
        return super().training_step(*arguments)


@pytest.mark.parametrize("kind", [ByHelper, ByInnerFunction, Decorated])
def test_a_hook_that_calls_anlits_elsewhere_is_taken(kind: Any) -> None:
    assert fit(tiny(kind), max_steps=1).trainer.global_step == 1


def test_parameters_that_no_optimizer_has_are_refused_unless_frozen() -> None:
    with pytest.raises(UserError, match=r"outside of its decoder \(auxiliary.weight, auxiliary"):
        fit(tiny(Auxiliary), max_steps=1)

    frozen: Any = tiny(Auxiliary)
    frozen.auxiliary.requires_grad_(False)
    assert fit(frozen, max_steps=1).trainer.global_step == 1


def test_a_decoder_without_vectors_has_groups() -> None:
    class WithoutGains(GPTDecoder):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for module in self.modules():
                if not isinstance(module, Attention) and hasattr(module, "gain"):
                    module.gain = None

    class Own(anlit.GPT):
        decoder_class = WithoutGains

    groups = parameter_groups(tiny(Own).model)

    assert {group["name"] for group in groups} == {"matrices", "embedding", "head"}

"""Models small enough for a test, jolted off their initial values, and a Trainer to run them."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from anlit import AdamW
from anlit.config.objects import parameters_of
from anlit.config.registry import public_classes
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.runtime import Runtime
from anlit.training.language_model import LanguageModel
from anlit.training.optim.schedule import Cosine
from tests.data.modules import collate, quiet_trainer

ARCHITECTURES = [*public_classes("anlit.training.models").values()]
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
SIZE = {"vocab_size": 29, "context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 32}


def has_setting(architecture: type[LanguageModel], name: str) -> bool:
    names = [parameter.name for parameter in parameters_of(architecture)]
    return name in names


def is_normalised(architecture: type[LanguageModel]) -> bool:
    """Whether it has the step sizes of nGPT and anGPT."""
    return has_setting(architecture, "alpha_init")


def tiny(
    architecture: Callable[..., LanguageModel], seed: int = 0, **changes: Any
) -> LanguageModel:
    torch.manual_seed(seed)
    return architecture(**{**SIZE, **changes})


def jolt(model: LanguageModel, seed: int = 1) -> LanguageModel:
    """Move every parameter off its initial value: no gain is 1, no vector constant.

    Some α turn negative.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            root_mean_square = parameter.square().mean().sqrt()
            parameter.add_(0.4 * root_mean_square * noise)
            if "alpha" in name:
                parameter[::3] *= -1
    return model


def decoder(architecture: Callable[..., LanguageModel], seed: int = 0, **changes: Any) -> Decoder:
    """The decoder of a jolted tiny model, in float64, as it generates and scores."""
    model = jolt(tiny(architecture, seed, **changes))
    return model.double().eval().model


def prepare_to_train(decoder: Decoder, runtime: Runtime, device_type: str) -> None:
    """Prepare a decoder as a run on a device of this type does."""
    runtime.prepare(decoder, device_type)
    runtime.wrap_blocks(decoder, device_type, runtime.compiles_on(device_type))


def next_token_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss and objective from all logits (B, T, V); see `linear_cross_entropy`."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    is_counted = targets != IGNORE_INDEX
    n_counted = is_counted.sum().clamp_min(1)  # without targets a loss of 0, not NaN
    loss_sum = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    loss = loss_sum / n_counted
    penalties = logits.logsumexp(-1).square()
    penalty = torch.where(is_counted, penalties, 0).sum() / n_counted
    return loss, loss + z_loss * penalty


def random_tokens(*shape: int, seed: int = 0, vocab_size: int = SIZE["vocab_size"]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, shape, generator=generator)


def adamw(lr: float, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda groups: AdamW(groups, lr=lr, **settings)


def batches(n_sequences: int, length: int, batch_size: int = 4) -> DataLoader:
    """The same random tokens each time, as training reads them; token 0 ends a document."""
    blocks = list(random_tokens(n_sequences, length + 1, seed=7))
    return DataLoader(blocks, batch_size=batch_size, collate_fn=collate)


class Logged(L.Callback):
    """Records values logged under these names, at the last micro-batch of an optimizer step."""

    def __init__(self, *names: str) -> None:
        self.values: dict[str, list[float]] = {name: [] for name in names}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            for name, values in self.values.items():
                values.append(float(trainer.callback_metrics[name]))


def fit(
    model: LanguageModel,
    max_steps: int,
    batch_size: int = 4,
    accumulate: int = 1,
    loader: DataLoader | None = None,
    **changes: Any,
) -> LanguageModel:
    """Take `max_steps` optimizer steps on random tokens, or on the batches of `loader`.

    `changes` are settings of the Trainer.
    """
    if loader is None:
        n_sequences = max_steps * batch_size * accumulate
        loader = batches(n_sequences, model.context_length, batch_size)
    settings = {"devices": 1, "gradient_clip_val": 1.0, **changes}
    trainer = quiet_trainer(max_steps=max_steps, accumulate_grad_batches=accumulate, **settings)
    trainer.fit(model, loader)
    return model


CONSTANT = Cosine(final=1.0)
"""The peak rate throughout."""

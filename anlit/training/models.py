"""GPT+, nGPT and anGPT as LightningModules: each network with its optimizer and schedule."""

from typing import Any

from anlit.config.objects import lazy_default
from anlit.nn.models.angpt import AnGPTConfig, AnGPTDecoder
from anlit.nn.models.decoder import Decoder
from anlit.nn.models.gpt import GPTConfig, GPTDecoder
from anlit.nn.models.ngpt import NGPTConfig, NGPTDecoder
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import AdamW, OptimizerFactory
from anlit.training.optim.schedule import Cosine, Schedule

__all__ = ["GPT", "NGPT", "AnGPT"]


class GPT(LanguageModel):
    """GPT+ with its training settings.

    Args:
        optimizer: Called with the parameter groups; any torch optimizer, or anlit's MuonAdamW.
        schedule: Learning rate over the run.
        lr_factors: Multiples of the rate for the parameter groups embedding, head, matrices and
            vectors, by default 1.
        settings: The fields of `GPTConfig`.
    """

    decoder_class: type[Decoder] = GPTDecoder
    """The network. A subclass may name another one that takes the same settings."""

    def __init__(
        self,
        optimizer: OptimizerFactory = lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.1),
        schedule: Schedule = lazy_default(Cosine, warmup=0.2),
        lr_factors: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        config = GPTConfig(**settings)
        super().__init__(self.decoder_class, config, optimizer, schedule, lr_factors)


class NGPT(LanguageModel):
    """nGPT with its training settings.

    Args:
        optimizer: Called with the parameter groups; any torch optimizer, or anlit's MuonAdamW.
        schedule: Learning rate over the run.
        lr_factors: Multiples of the rate for the parameter groups embedding, head, matrices and
            vectors, by default 1.
        settings: The fields of `NGPTConfig`.
    """

    decoder_class: type[Decoder] = NGPTDecoder
    """The network. A subclass may name another one that takes the same settings."""

    def __init__(
        self,
        optimizer: OptimizerFactory = lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.0),
        schedule: Schedule = lazy_default(Cosine),
        lr_factors: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        config = NGPTConfig(**settings)
        super().__init__(self.decoder_class, config, optimizer, schedule, lr_factors)


class AnGPT(LanguageModel):
    """anGPT with its training settings.

    Args:
        optimizer: Called with the parameter groups; any torch optimizer, or anlit's MuonAdamW.
        schedule: Learning rate over the run.
        lr_factors: Multiples of the rate for the parameter groups embedding, head, matrices and
            vectors, by default 1.
        settings: The fields of `AnGPTConfig`.
    """

    decoder_class: type[Decoder] = AnGPTDecoder
    """The network. A subclass may name another one that takes the same settings."""

    def __init__(
        self,
        optimizer: OptimizerFactory = lambda groups: AdamW(groups, lr=1e-3, weight_decay=0.0),
        schedule: Schedule = lazy_default(Cosine),
        lr_factors: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        config = AnGPTConfig(**settings)
        super().__init__(self.decoder_class, config, optimizer, schedule, lr_factors)

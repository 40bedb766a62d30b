"""Models as users write them."""

from typing import Any

from torch import nn

from anlit.nn.models.gpt import GPTConfig, GPTDecoder
from anlit.training.language_model import LanguageModel
from anlit.training.optim.optimizers import AdamW
from anlit.training.optim.schedule import Constant


class BigramDecoder(GPTDecoder):
    """Embedding and head, without blocks and attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList()

    def clip_qk(self) -> None:
        """There are no queries and keys."""


class Bigram(LanguageModel):
    def __init__(self, **settings: Any) -> None:
        super().__init__(BigramDecoder, GPTConfig(**settings), AdamW, Constant())

"""A trained model in a notebook: it continues, scores and measures text.

model = anlit.load_checkpoint("runs/gpt")
model.generate("Once upon a time", max_tokens=50)
model.loss("Once upon a time there was a king.")
"""

from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np

from anlit.errors import UserError
from anlit.evaluation.chat import Message
from anlit.evaluation.generation import Request, Sampling
from anlit.evaluation.scoring import Scores, score_documents
from anlit.evaluation.text_generation import continue_requests
from anlit.evaluation.text_stream import decode_continuation
from anlit.evaluation.tokenizer import CheckpointTokenizer, load_checkpoint_tokenizer
from anlit.training import load_model
from anlit.training.load_model import Checkpoint


class TrainedModel(Checkpoint):
    """A checkpoint with its tokenizer. `model` is the LightningModule, in eval mode."""

    @cached_property
    def tokenizer(self) -> CheckpointTokenizer:
        """The tokenizer of the run, exported folder or data. Raises UserError without it."""
        return load_checkpoint_tokenizer(self)

    @cached_property
    def chat_tokenizer(self) -> CheckpointTokenizer:
        """The tokenizer, to which the name of a special token in a text is that token."""
        return load_checkpoint_tokenizer(self, special_tokens=True)

    def generate(
        self,
        prompt: str = "",
        max_tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return the text after `prompt`; `anlit generate` draws the same with these settings.

        Raises UserError if a number is out of its range, or the prompt has no tokens.
        """
        tokenizer = self.tokenizer
        request = Request(tokenizer.encode_prompt(prompt))
        sampling = Sampling(temperature, top_k, top_p, seed)
        (continuation,) = continue_requests(tokenizer, [request], max_tokens, sampling)
        return decode_continuation(tokenizer.tokenizer, request.prompt, continuation.tokens)

    def chat(
        self,
        messages: list[Message],
        max_tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> str:
        """Return the answer to messages such as {"role": "user", "content": "Hello"}.

        Raises UserError as `generate`, and if the model has no chat template.
        """
        tokenizer = self.chat_tokenizer
        request = Request(tokenizer.encode_chat(messages))
        sampling = Sampling(temperature, top_k, top_p, seed)
        (answer,) = continue_requests(tokenizer, [request], max_tokens, sampling, is_chat=True)
        return decode_continuation(tokenizer.tokenizer, [], answer.tokens)

    def score(self, text: str, stride: int | None = None) -> Scores:
        """Return the log-likelihood in nats and the rank of each token of a text.

        Args:
            text: A document.
            stride: Tokens by which windows of the training length advance; by default half of it.

        Raises UserError if the text has no tokens.
        """
        tokens = self.tokenizer.encode(text)
        if not tokens:
            raise UserError("the tokenizer makes no tokens of the text: give a longer text")
        length = self.training_length
        (scores,) = score_documents(
            self.model.model,
            [tokens],
            length,
            stride or max(1, length // 2),
            self.tokenizer.scoring_separator(),
        )
        return scores

    def loss(self, text: str, stride: int | None = None) -> float:
        """Return the mean loss of a text's tokens in nats, without tokens that have no context.

        Raises UserError as `score`, and if no token has a context.
        """
        log_likelihood = self.score(text, stride).log_likelihood
        if np.isnan(log_likelihood).all():
            raise UserError("no token of the text has a token before it: give a longer text")
        return -float(np.nanmean(log_likelihood))


def load_checkpoint(path: str, device: str = "auto", **changes: Any) -> TrainedModel:
    """Load the model of a run folder (best, else last checkpoint), a .ckpt file or an export.

    Args:
        path: The folder or file.
        device: A torch device, or auto for the GPU if there is one.
        changes: Constructor arguments to replace, such as kernel="eager".

    Raises:
        UserError: There is no checkpoint, it is damaged or foreign, or the device cannot be used.
    """
    checkpoint = load_model.load_checkpoint(path, device, **changes)
    return TrainedModel(*(getattr(checkpoint, field.name) for field in fields(checkpoint)))

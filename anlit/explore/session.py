"""The content of the page for each model: a continuation, the loss over the text, attention statistics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers.decoders import DecodeStream

from anlit.attention.observation import observed
from anlit.checkpoints.loading import FOLDER, NAMES, Checkpoint, load_checkpoint
from anlit.configuration import CONFIG
from anlit.errors import UserError
from anlit.inference.generation import Ending, Request, generate
from anlit.inference.sampling import Sampling
from anlit.inference.scoring import Scores, score
from anlit.inference.text import Text, text_of

MOST_TOKENS = 4096
"""The most tokens of a prompt and its continuation together."""
LONGEST_TOKEN = 64
"""In characters. A prompt with more characters than this per allowed token is refused without encoding it."""


class Stopped(Exception):  # noqa: N818 (it is not an error)
    """The user stopped a continuation."""


class Piece(NamedTuple):
    """Complete characters, and the mean loss in nats of their tokens; NaN if nothing predicts them."""

    text: str
    loss: float


@dataclass(frozen=True, eq=False)
class View:
    """The results of one model for one text."""

    name: str
    label: str
    """Architecture and attention mechanism."""
    step: int
    prompt: list[Piece]
    continuation: list[Piece]
    losses: tuple[float, float]
    """Mean nats per token of the prompt and of the continuation."""
    n_tokens: tuple[int, int]
    ended: bool
    """Whether the model ended its document."""
    guess: float
    """The loss of a uniform guess among all tokens, in nats."""
    attention: dict[str, np.ndarray]
    """Statistics over the whole text by name, each (layers, heads)."""


class Session:
    """The models of a page, loaded when they are first used.

    Args:
        paths: Run folders, checkpoints or exported folders.
        device: As in `load_checkpoint`.
        tokenizer: As in `text_of`, for all models.
        most_tokens: The most tokens of a prompt and its continuation together.

    Raises:
        UserError: There is no model, or one is named twice.
    """

    def __init__(
        self,
        paths: Sequence[str],
        device: str = "auto",
        tokenizer: str | None = None,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        if not paths:
            raise UserError("there is no model to show: name checkpoints, or give a folder of run folders with --runs")
        self.paths = dict(zip(distinct_names(paths), paths, strict=True))
        self.device, self.tokenizer, self.most_tokens = device, tokenizer, most_tokens
        self._loaded: dict[str, tuple[Checkpoint, Text]] = {}
        self._stop = Event()

    def begin(self) -> None:
        """Clear an earlier `stop`."""
        self._stop.clear()

    def stop(self) -> None:
        """Make a `look` in another thread end at its next token."""
        self._stop.set()

    def _go_on(self, *_: Any) -> None:
        if self._stop.is_set():
            raise Stopped

    def load(self, name: str) -> tuple[Checkpoint, Text]:
        """A model and its tokenizer.

        Raises:
            UserError: The checkpoint or the tokenizer cannot be read.
        """
        if name not in self._loaded:
            checkpoint = load_checkpoint(self.paths[name], self.device)
            self._loaded[name] = checkpoint, text_of(checkpoint, self.tokenizer)
        return self._loaded[name]

    def look(self, name: str, prompt: str, max_tokens: int, sampling: Sampling) -> View:
        """Continue a prompt with one model and measure the result; `max_tokens` of 0 measures the prompt alone.

        Raises:
            UserError: The prompt is empty, it is too long with its continuation, or the model cannot be loaded.
            Stopped: `stop` was called.
        """
        self._go_on()
        checkpoint, text = self.load(name)
        decoder, ending = checkpoint.model.model, text.ending(stops=True)
        prompt_tokens, continued, ended = self._encode(prompt, max_tokens, text), [], False
        inputs = text.prompt(prompt, checkpoint)
        if max_tokens:
            request = [Request(inputs)]
            (found,) = generate(
                decoder, request, max_tokens, sampling, ending, n_allowed=text.size, on_token=self._go_on
            )
            continued, ended = found.tokens, found.finish == "end_of_document"
        tokens = np.array([*prompt_tokens, *continued])
        n_prompt = len(prompt_tokens)
        (scores,) = score(decoder, [tokens], length=len(tokens) + 1, ending=ending)
        halves = (scores.log_likelihood[:n_prompt], scores.log_likelihood[n_prompt:])
        return View(
            name=name,
            label=checkpoint.label,
            step=checkpoint.step,
            prompt=pieces(text, scores, 0, n_prompt),
            continuation=pieces(text, scores, n_prompt, len(tokens)),
            losses=(mean_loss(halves[0]), mean_loss(halves[1])),
            n_tokens=(n_prompt, len(continued)),
            ended=ended,
            guess=math.log(text.size),
            attention=attention_of(decoder, [*inputs, *continued], ending),
        )

    def _encode(self, prompt: str, max_tokens: int, text: Text) -> list[int]:
        """The prompt's tokens. A prompt that is far too long is refused without encoding it."""
        short = len(prompt) <= LONGEST_TOKEN * self.most_tokens
        tokens = text.encode(prompt) if short else []
        if not short or len(tokens) + max_tokens > self.most_tokens:
            length = f"{len(tokens):,} tokens" if short else f"{len(prompt):,} characters"
            raise UserError(
                f"a prompt of {length} and {max_tokens:,} tokens to come are more than the {self.most_tokens:,} tokens "
                "of this page: shorten the prompt, or start the page with a larger --most_tokens"
            )
        return tokens


def find_runs(folder: str) -> list[str]:
    """The run folders with a checkpoint, up to two levels below `folder`, sorted."""
    found = {path.parent for depth in ("*", "*/*") for path in Path(folder).glob(f"{depth}/{CONFIG}")}
    return sorted(str(run) for run in found if any((run / FOLDER / name).exists() for name in NAMES))


def distinct_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that are distinct."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-count:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"{next(path for path in paths if paths.count(path) > 1)} is named twice: name it once")


def pieces(text: Text, scores: Scores, begin: int, end: int) -> list[Piece]:
    """The tokens [begin, end) as text; tokens that together make one character are one piece."""
    stream = DecodeStream(skip_special_tokens=False)
    found, waiting = [], []
    for token, chance in zip(scores.tokens[begin:end].tolist(), scores.log_likelihood[begin:end].tolist(), strict=True):
        waiting.append(-chance)
        if chunk := stream.step(text.tokenizer, token):
            found.append(Piece(chunk, sum(waiting) / len(waiting)))
            waiting = []
    return [*found, Piece("�", sum(waiting) / len(waiting))] if waiting else found


def mean_loss(log_likelihood: np.ndarray) -> float:
    """Mean loss in nats over the scored tokens; NaN if there are none."""
    known = log_likelihood[~np.isnan(log_likelihood)]
    return float(-known.mean()) if len(known) else math.nan


@torch.inference_mode()
def attention_of(decoder: Any, tokens: Sequence[int], ending: Ending) -> dict[str, np.ndarray]:
    """Each statistic of `anlit diagnose`, averaged over the tokens of one document: (layers, heads)."""
    with observed(decoder, edges=[1], spans=[]) as layers:
        decoder(torch.tensor([list(tokens)], device=decoder.embedding.weight.device))
    means = [layer.means() for layer in layers]
    assert all(a.keys() == b.keys() for a, b in pairwise(means))
    return {name: np.stack([layer[name][:, 0].numpy(force=True) for layer in means]) for name in means[0]}

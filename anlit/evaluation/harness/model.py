"""A checkpoint as a language model of the lm-evaluation-harness. Imports lm_eval, which is an extra."""

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from anlit.checkpoints.loading import Checkpoint
from anlit.errors import UserError
from anlit.inference.continuations import Pair, score_continuations
from anlit.inference.generation import Request, generate
from anlit.inference.sampling import Sampling
from anlit.inference.text import Text

MOST_NEW_TOKENS = 256
"""The length of a generation if the task names none, as in lm_eval's models."""


class HarnessModel(TemplateLM):
    """The interface of lm_eval's models, with anlit's cache of keys and values.

    Args:
        checkpoint: The model.
        text: Its tokenizer.
        batch_size: Sequences in a batch.
        max_length: The most tokens that the model reads; of longer inputs the first tokens are left out.
    """

    def __init__(self, checkpoint: Checkpoint, text: Text, batch_size: int, max_length: int) -> None:
        super().__init__()
        self.decoder = checkpoint.model.model
        self.text, self.batch_size, self.max_length = text, batch_size, max_length

    @property
    def eot_token_id(self) -> int:
        """The token that separates documents; it comes before a text without context."""
        if self.text.end_of_document is None:
            raise UserError(
                "the task scores a text without context, for which the tokenizer needs a token that separates documents"
                ": choose another task, or a model whose tokenizer has one"
            )
        return self.text.end_of_document

    @property
    def tokenizer_name(self) -> str:
        """Needed only if requests are cached on disk, which anlit does not do."""
        return type(self.text.tokenizer).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [Pair(context, continuation) for _, context, continuation in requests]
        return self._scores(pairs, disable_tqdm)

    def _scores(self, pairs: list[Pair], disable_tqdm: bool) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=disable_tqdm) as bar:
            scores = score_continuations(
                self.decoder, pairs, self.max_length, self.batch_size, self.text.ending(stops=True), bar.update
            )
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of complete texts, each read in windows that score disjoint tokens."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.text.encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, 1):
                pairs.append(Pair(*make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._scores(pairs, disable_tqdm), strict=True):
            sums[owner] += log_likelihood
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to the first stop string of the task, which is left out."""
        found = []
        for request in tqdm(requests, desc="generations", disable=disable_tqdm):
            context, settings = request.args
            found.append(self._continue(context, dict(settings)))
        return found

    def _continue(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        n_new = min(int(settings.get("max_gen_toks", MOST_NEW_TOKENS)), self.max_length - 1)
        tokens = self.text.encode(context)[-(self.max_length - n_new) :] or [self.eot_token_id]
        temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature, settings.get("top_k"), settings.get("top_p"))
        ending = self.text.ending(stops=True)
        (continuation,) = generate(self.decoder, [Request(tokens)], n_new, sampling, ending, n_allowed=self.text.size)
        return cut(self.text.decode(continuation.tokens), stops)


def cut(text: str, stops: list[str]) -> str:
    """`text` up to the first of `stops` in it; empty ones do not count."""
    positions = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(positions)] if positions else text

"""Continuations are equal to the model's without a cache, whatever else is in the batch."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from anlit import GPT, NGPT, ALiBi, AnGPT, DynamicNTK, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.generation import Continuation, Request, Sampling, Separator, generate
from anlit.nn.models.decoder import Decoder
from tests.nn.attention.examples import SHIPPED
from tests.nn.models.tiny import decoder, random_tokens

END = 3
SEPARATOR = Separator(END, "end")
FIRST = random_tokens(5, seed=5).tolist()
WITH_END = random_tokens(17, seed=18).tolist()
WITH_END[6] = END
LONG = random_tokens(17, seed=19).tolist()
SINGLE_TOKEN = random_tokens(1, seed=4).tolist()
PROMPTS = [FIRST, WITH_END, LONG, SINGLE_TOKEN]
REQUESTS = [Request(prompt, sample) for sample, prompt in enumerate(PROMPTS)]
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.0, seed=4)


class EndlessSampling(Sampling):
    """Draws no end of a document."""

    def draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        end = torch.tensor(END)
        return super().draw(logits.index_fill(-1, end, -1e9), uniform)


WINDOW = SlidingWindow(100, ScaleInvariant())
MODELS = {
    "plain": (GPT, {}),
    "ALiBi": (NGPT, {"attention": ALiBi()}),
    "scale-invariant": (AnGPT, {"attention": ScaleInvariant()}),
    "separator at the start": (AnGPT, {"attention": SqrtLogN()}),
    "pattern": (GPT, {"attention": SHIPPED["pattern"]}),
    "unmasked window": (NGPT, {"attention": WINDOW, "document_masking": False}),
    # These positions follow the length of the whole sequence.
    "dynamic NTK": (GPT, {"positions": DynamicNTK(training_length=16)}),
}
"""Architectures and their settings."""


@pytest.mark.parametrize("n_tokens", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(EndlessSampling(temperature=0), id="greedy"),
        pytest.param(EndlessSampling(seed=4), id="sampled"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_cache_does_not_change_the_tokens(name: str, sampling: Sampling, n_tokens: int) -> None:
    """A single forward pass over prompt and continuation chooses the same token everywhere."""
    architecture, settings = MODELS[name]
    model = decoder(architecture, **settings)
    separator = SEPARATOR
    if name == "separator at the start":
        separator = Separator(END, "start")

    continuations = generate(model, REQUESTS, n_tokens, sampling, separator)

    for request, continuation in zip(REQUESTS, continuations, strict=True):
        text = [*request.prompt, *continuation.tokens]
        logits = single_pass(model, text, separator)[len(request.prompt) - 1 : -1]
        uniforms = sampling.uniforms(request.sample, n_tokens)
        expected = sampling.draw(logits, uniforms)
        log_likelihoods = -cross_entropy(logits, expected, reduction="none")
        assert len(continuation.tokens) == n_tokens
        assert continuation.tokens == expected.tolist()
        assert continuation.log_likelihood == pytest.approx(log_likelihoods.tolist())


def single_pass(model: Decoder, text: list[int], separator: Separator) -> torch.Tensor:
    """The logits of a text without a cache, (T, V)."""
    tokens = np.array([text])
    ids = document_ids(tokens, separator.token, separator.at)
    (logits,) = model(torch.from_numpy(tokens), torch.from_numpy(ids))
    return logits


TWO_SAMPLES_EACH = [Request(prompt, sample) for prompt, sample in product(PROMPTS, (0, 1))]
N_ALLOWED = 20


def continue_all(requests: list[Request], batch_size: int, **options: Any) -> list[Continuation]:
    """Sample up to 40 tokens for each request, of the first `N_ALLOWED` tokens."""
    model = decoder(AnGPT, attention=ScaleInvariant())
    options |= {"batch_size": batch_size, "n_allowed": N_ALLOWED}
    return generate(model, requests, 40, SAMPLED, SEPARATOR, **options)


def tokens_of(continuations: list[Continuation]) -> list[list[int]]:
    return [continuation.tokens for continuation in continuations]


def test_the_size_of_the_batch_changes_nothing() -> None:
    expected = tokens_of(continue_all(TWO_SAMPLES_EACH, batch_size=8))

    one_by_one = continue_all(TWO_SAMPLES_EACH, batch_size=1)
    four_together = continue_all(TWO_SAMPLES_EACH, batch_size=4)
    fifth_alone = continue_all([TWO_SAMPLES_EACH[4]], batch_size=8)

    assert tokens_of(one_by_one) == expected
    assert tokens_of(four_together) == expected
    assert tokens_of(fifth_alone) == [expected[4]]


def test_samples_differ_and_have_allowed_tokens_without_the_end() -> None:
    continuations = continue_all(TWO_SAMPLES_EACH, batch_size=8)

    tokens = tokens_of(continuations)
    different_continuations = set(map(tuple, tokens))
    assert len(different_continuations) == 8
    finishes = {continuation.finish for continuation in continuations}
    assert finishes == {"end_of_document", "length"}
    drawn_tokens = set().union(*tokens)
    assert drawn_tokens <= set(range(N_ALLOWED)) - {END}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_tokens_are_reported_as_they_come(batch_size: int) -> None:
    events: list[tuple[int, int]] = []

    def record(number: int, token: int) -> None:
        events.append((number, token))

    continuations = continue_all(TWO_SAMPLES_EACH, batch_size, on_token=record)

    reported: list[list[int]] = [[] for _ in TWO_SAMPLES_EACH]
    for number, token in events:
        reported[number].append(token)
    assert reported == tokens_of(continuations)
    numbers_of_first_steps = {number for number, _ in events[: 2 * batch_size]}
    assert len(numbers_of_first_steps) == batch_size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 must be 0"),
        ({"temperature": math.inf}, "temperature inf must be 0"),
        ({"top_k": 0}, "top_k 0 must be 1 or more"),
        ({"top_p": 0.0}, r"top_p 0 must be a probability in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p 1.1 must be a probability in \(0, 1\]"),
        ({"seed": -1}, "seed -1 must be 0 or more"),
    ],
)
def test_a_setting_of_sampling_beyond_its_bound_is_refused(settings, message: str) -> None:
    Sampling(temperature=0.0, top_k=1, top_p=1.0, seed=0)  # the bounds themselves

    with pytest.raises(UserError, match=message):
        Sampling(**settings)


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0])
    rows = logits.expand(20_000, -1)
    uniforms = Sampling(seed=1).uniforms(0, 20_000)

    def shares(**settings: Any) -> list[float]:
        drawn = Sampling(**settings).draw(rows, uniforms)
        counts = torch.bincount(drawn, minlength=4)
        return (counts / len(drawn)).tolist()

    probabilities = logits.softmax(-1).tolist()
    flatter_probabilities = (logits / 2).softmax(-1).tolist()
    first, second = torch.tensor([3.0, 2.0]).softmax(-1).tolist()
    two_most_probable = [0, first, second, 0]
    most_probable = [0, 1, 0, 0]
    assert shares() == pytest.approx(probabilities, abs=0.01)
    assert shares(temperature=2.0) == pytest.approx(flatter_probabilities, abs=0.01)
    assert shares(top_k=2) == pytest.approx(two_most_probable, abs=0.01)
    # The largest probability is 0.657.
    assert shares(top_p=0.66) == pytest.approx(two_most_probable, abs=0.01)
    assert shares(top_p=0.65) == most_probable
    assert shares(temperature=0) == most_probable
    assert shares(top_k=100, top_p=1.0) == shares()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        pytest.param([], 5, "the prompt is empty", id="empty"),
        pytest.param([1, 29], 5, "the token 29, .* 0 to 28", id="outside the vocabulary"),
        pytest.param([4], 5, "logits are not finite", id="damaged weights"),
        pytest.param(
            [1],
            10**12,
            r"5 × 17 tokens do not fit into .* smaller --batch_size or --max_tokens",
            id="too long",
        ),
    ],
)
def test_wrong_prompts_are_refused_before_anything_is_generated(
    prompt: list[int], max_tokens: int, message: str
) -> None:
    model = decoder(GPT)
    if prompt == [4]:
        model.head.weight.data[4, 4] = torch.nan
    requests = [*REQUESTS, Request(prompt)]
    events: list[object] = []

    def record(*event: int) -> None:
        events.append(event)

    with pytest.raises(UserError, match=message):
        generate(model, requests, max_tokens, GREEDY, on_token=record)

    assert not events

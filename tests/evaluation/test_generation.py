"""Continuations are equal to the model's without a cache, whatever else is in the batch."""

from typing import Any

import numpy as np
import pytest
import torch

from anlit import GPT, NGPT, ALiBi, AnGPT, DynamicNTK, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.generation import Request, Sampling, Separator, generate
from tests.nn.attention.examples import SHIPPED
from tests.nn.models.tiny import decoder, random_tokens

END = 3
SEPARATOR = Separator(END, "end")
PROMPTS = [
    random_tokens(5, seed=5).tolist(),
    random_tokens(17, seed=18).tolist(),
    random_tokens(17, seed=19).tolist(),
    random_tokens(1, seed=4).tolist(),
]
PROMPTS[1][6] = END
REQUESTS = [Request(prompt, sample) for sample, prompt in enumerate(PROMPTS)]
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.0, seed=4)


class EndlessSampling(Sampling):
    """Draws no end of a document."""

    def draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return super().draw(logits.index_fill(-1, torch.tensor(END), -1e9), uniform)


MODELS = {
    "plain": (GPT, {}, SEPARATOR),
    "ALiBi": (NGPT, {"attention": ALiBi()}, SEPARATOR),
    "scale-invariant": (AnGPT, {"attention": ScaleInvariant()}, SEPARATOR),
    "separator at the start": (AnGPT, {"attention": SqrtLogN()}, Separator(END, "start")),
    "pattern": (GPT, {"attention": SHIPPED["pattern"]}, SEPARATOR),
    "unmasked window": (
        NGPT,
        {"attention": SlidingWindow(100, ScaleInvariant()), "document_masking": False},
        SEPARATOR,
    ),
    # These positions follow the length of the whole sequence.
    "dynamic NTK": (GPT, {"positions": DynamicNTK(training_length=16)}, SEPARATOR),
}


@pytest.mark.parametrize("n_tokens", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_cache_does_not_change_the_tokens(name: str, n_tokens: int) -> None:
    """A single forward pass over prompt and continuation chooses the same token everywhere."""
    architecture, settings, separator = MODELS[name]
    model = decoder(architecture, **settings)

    for sampling in (EndlessSampling(temperature=0), EndlessSampling(seed=4)):
        continuations = generate(model, REQUESTS, n_tokens, sampling, separator)

        for request, continuation in zip(REQUESTS, continuations, strict=True):
            tokens = np.array([[*request.prompt, *continuation.tokens]])
            ids = document_ids(tokens, separator.token, separator.at)
            logits = model(torch.from_numpy(tokens), torch.from_numpy(ids))[0]
            logits = logits[len(request.prompt) - 1 : -1]
            uniforms = sampling.uniforms(request.sample, n_tokens)
            expected = sampling.draw(logits, uniforms)
            log_likelihoods = logits.log_softmax(-1)
            log_likelihood = log_likelihoods[range(n_tokens), expected]
            assert continuation.tokens == expected.tolist()
            assert len(continuation.tokens) == n_tokens
            assert continuation.log_likelihood == pytest.approx(log_likelihood.tolist())


def test_the_size_of_the_batch_changes_nothing() -> None:
    """Tokens are reported as they come, and only tokens that have a text are drawn."""
    model = decoder(AnGPT, attention=ScaleInvariant())
    n_allowed = 20
    requests = []
    for prompt in PROMPTS:
        requests += [Request(prompt, 0), Request(prompt, 1)]

    together = generate(model, requests, 40, SAMPLED, SEPARATOR, 8, n_allowed)

    expected = [continuation.tokens for continuation in together]
    for batch_size in (1, 4):
        events: list[tuple[int, int]] = []

        def record(number: int, token: int, events: Any = events) -> None:
            events.append((number, token))

        apart = generate(
            model, requests, 40, SAMPLED, SEPARATOR, batch_size, n_allowed, on_token=record
        )
        assert [continuation.tokens for continuation in apart] == expected
        reported: list[list[int]] = [[] for _ in requests]
        for number, token in events:
            reported[number].append(token)
        assert reported == expected
        first_numbers = {number for number, _ in events[: 2 * batch_size]}
        assert len(first_numbers) == batch_size
    (alone,) = generate(model, [requests[4]], 40, SAMPLED, SEPARATOR, 8, n_allowed)
    assert alone.tokens == expected[4]
    assert len(set(map(tuple, expected))) == 8
    finishes = {continuation.finish for continuation in together}
    assert finishes == {"end_of_document", "length"}
    drawn_tokens = set().union(*expected)
    assert drawn_tokens <= set(range(n_allowed)) - {END}


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).expand(20_000, -1)
    uniforms = Sampling(seed=1).uniforms(0, 20_000)

    def shares(**settings: Any) -> list[float]:
        drawn = Sampling(**settings).draw(logits, uniforms)
        return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()

    first, second = torch.tensor([3.0, 2.0]).softmax(-1).tolist()
    only_two = pytest.approx([0, first, second, 0], abs=0.01)
    assert shares() == pytest.approx(logits[0].softmax(-1).tolist(), abs=0.01)
    assert shares(temperature=2.0) == pytest.approx((logits[0] / 2).softmax(-1).tolist(), abs=0.01)
    assert shares(top_k=2) == only_two
    # The largest probability is 0.657.
    assert shares(top_p=0.66) == only_two
    assert shares(top_p=0.65) == [0, 1, 0, 0]
    assert shares(temperature=0) == [0, 1, 0, 0]
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

    with pytest.raises(UserError, match=message):
        generate(model, requests, max_tokens, GREEDY, on_token=lambda *event: events.append(event))

    assert not events

"""Continuations are those of the model without a cache, whatever else is in the batch."""

import numpy as np
import pytest
import torch

from anlit import GPT, NGPT, ALiBi, AnGPT, DynamicNTK, Plain, ScaleInvariant, SlidingWindow, SqrtLogN
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.inference.generation import Continuation, Ending, Request, Sampling, generate
from anlit.models.decoder import Decoder
from tests.attention.examples import SHIPPED
from tests.models.tiny import ARCHITECTURES, jolt, random_tokens, tiny

END = 3
ENDING = Ending(END, "end")
PROMPTS = [random_tokens(length, seed=length).tolist() for length in (5, 17, 1)]
PROMPTS[1][6] = END
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.0, seed=4)


class Endless(Sampling):
    """Draws no end of a document."""

    def draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return super().draw(logits.index_fill(-1, torch.tensor(END), -1e9), uniform)


MECHANISMS = {
    "plain": Plain(),
    "scale-invariant": ScaleInvariant(),
    "sqrt log n": SqrtLogN(),
    "alibi": ALiBi(),
    "window, scale-invariant": SlidingWindow(100, ScaleInvariant()),
    "pattern": SHIPPED["pattern"],
}


def decoder(architecture, seed: int = 0, **changes) -> Decoder:
    return jolt(tiny(architecture, seed, **changes)).double().eval().model


def requests() -> list[Request]:
    return [Request(prompt, sample) for sample, prompt in enumerate(PROMPTS)]


@torch.no_grad()
def assert_as_without_cache(
    model: Decoder, request: Request, found: Continuation, n: int, sampling: Sampling, ending: Ending
) -> None:
    """One forward pass over prompt and continuation chooses the same token at every place."""
    tokens = np.array([[*request.prompt, *found.tokens]])
    ids = document_ids(tokens, ending.token, ending.at)
    logits = model(torch.from_numpy(tokens), torch.from_numpy(ids))[0, len(request.prompt) - 1 : -1]
    chosen = sampling.draw(logits, sampling.uniforms(request.sample, n)[: len(logits)])
    assert chosen.tolist() == found.tokens
    chances = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.log_likelihood, dtype=torch.float64), chances)


def compare_with_no_cache(architecture, mechanism: str, n: int, **changes) -> None:
    model = decoder(architecture, attention=MECHANISMS[mechanism], **changes)
    for sampling in (Endless(temperature=0), Endless(seed=4)):
        found = generate(model, requests(), n, sampling, ENDING)
        for request, continuation in zip(requests(), found, strict=True):
            assert len(continuation.tokens) == n
            assert_as_without_cache(model, request, continuation, n, sampling, ENDING)


@pytest.mark.parametrize(
    ("architecture", "mechanism"),
    [(GPT, "plain"), (NGPT, "alibi"), (AnGPT, "scale-invariant"), (AnGPT, "sqrt log n"), (GPT, "pattern")],
)
def test_the_same_tokens_with_and_without_the_cache(architecture, mechanism: str) -> None:
    compare_with_no_cache(architecture, mechanism, 100)


@pytest.mark.slow
@pytest.mark.parametrize("masking", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_2000_tokens_with_and_without_the_cache(architecture, mechanism: str, masking: bool) -> None:
    compare_with_no_cache(architecture, mechanism, 2000, document_masking=masking)


def test_a_document_may_begin_with_its_separator() -> None:
    model, ending = decoder(GPT, attention=SqrtLogN()), Ending(END, "start")
    found = generate(model, requests(), 100, Endless(seed=4), ending)
    for request, continuation in zip(requests(), found, strict=True):
        assert_as_without_cache(model, request, continuation, 100, Endless(seed=4), ending)


def test_the_size_of_the_batch_changes_nothing() -> None:
    model, ending = decoder(AnGPT, attention=ScaleInvariant()), ENDING
    many = [Request(prompt, sample) for prompt in PROMPTS for sample in range(2)]
    together = generate(model, many, 40, SAMPLED, ending, batch_size=6)
    for batch_size in (1, 4):
        apart = generate(model, many, 40, SAMPLED, ending, batch_size=batch_size)
        assert [one.tokens for one in apart] == [one.tokens for one in together]
    assert [one.tokens for one in generate(model, [many[4]], 40, SAMPLED, ending)] == [together[4].tokens]
    assert len({tuple(one.tokens) for one in together}) == 6
    assert {one.finish for one in together} == {"end_of_document", "length"}
    assert not any(END in one.tokens for one in together)


def test_positions_that_follow_the_length_are_those_of_the_whole_sequence() -> None:
    model = decoder(GPT, positions=DynamicNTK(training_length=16))
    many = [Request(PROMPTS[1]), Request(random_tokens(17, seed=1).tolist(), 1), Request(PROMPTS[0])]
    sampling = Endless(seed=4)
    for request, continuation in zip(many, generate(model, many, 30, sampling, ENDING), strict=True):
        assert_as_without_cache(model, request, continuation, 30, sampling, ENDING)


def test_tokens_are_told_as_they_come() -> None:
    told: list[tuple[int, int | None]] = []
    model = decoder(GPT)
    found = generate(model, requests(), 4, GREEDY, batch_size=2, on_token=lambda *event: told.append(event))
    for number, continuation in enumerate(found):
        assert [token for own, token in told if own == number] == [*continuation.tokens, None]
    assert [number for number, _ in told[:4]] == [0, 1, 0, 1]


def test_drawing_follows_the_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]]).expand(20_000, -1)
    uniforms = Sampling(seed=1).uniforms(0, 20_000)

    def shares(**settings) -> list[float]:
        drawn = Sampling(**settings).draw(logits, uniforms)
        return (torch.bincount(drawn, minlength=4) / len(drawn)).tolist()

    assert shares() == pytest.approx(logits[0].softmax(-1).tolist(), abs=0.01)
    assert shares(temperature=2.0) == pytest.approx((logits[0] / 2).softmax(-1).tolist(), abs=0.01)
    two = torch.tensor([3.0, 2.0]).softmax(-1).tolist()
    assert shares(top_k=2) == pytest.approx([0, two[0], two[1], 0], abs=0.01)
    assert shares(top_p=0.66) == pytest.approx([0, two[0], two[1], 0], abs=0.01)  # the largest has 0.657
    assert shares(top_p=0.65) == [0, 1, 0, 0]
    assert shares(temperature=0) == [0, 1, 0, 0]
    assert shares(top_k=100, top_p=1.0) == shares()


def test_only_tokens_with_a_text_are_drawn() -> None:
    found = generate(decoder(GPT), requests(), 100, SAMPLED, n_allowed=10)
    assert max(token for one in found for token in one.tokens) < 10


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"temperature": -1.0}, "--temperature -1 must be 0"),
        ({"temperature": float("nan")}, "--temperature nan must be 0"),
        ({"top_k": 0}, "--top_k 0 must be at least 1"),
        ({"top_p": 0.0}, "--top_p 0 must be a probability"),
        ({"top_p": 1.5}, "--top_p 1.5 must be a probability"),
        ({"seed": -1}, "--seed -1 must not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Sampling(**settings)


def test_wrong_prompts_are_refused_before_anything_is_generated() -> None:
    told: list[object] = []
    for prompt, sentence in (([], "the prompt is empty"), ([1, 29], "the token 29, .* 0 to 28"), ([-1], "token -1")):
        with pytest.raises(UserError, match=sentence):
            generate(
                decoder(GPT), [*requests(), Request(prompt)], 5, GREEDY, on_token=lambda *event: told.append(event)
            )
    assert not told


def test_damaged_weights_and_too_long_texts_are_refused() -> None:
    model = decoder(GPT)
    with pytest.raises(UserError, match=r"3 rows of .* tokens need .* GB .* smaller --batch_size or --max_tokens"):
        generate(model, requests(), 10**12, GREEDY)
    with torch.no_grad():
        model.head.weight[4, 4] = torch.nan
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, requests(), 5, GREEDY)

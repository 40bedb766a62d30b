"""Continuations are those of the model without a cache, whatever else is in the batch."""

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
    random_tokens(length, seed=length + seed).tolist() for seed, length in enumerate((5, 17, 17, 1))
]
PROMPTS[1][6] = END
REQUESTS = [Request(prompt, sample) for sample, prompt in enumerate(PROMPTS)]
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.0, seed=4)


class Endless(Sampling):
    """Draws no end of a document."""

    def draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return super().draw(logits.index_fill(-1, torch.tensor(END), -1e9), uniform)


WINDOW = SlidingWindow(100, ScaleInvariant())


@pytest.mark.parametrize("n", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("architecture", "settings", "separator"), [
    (GPT, {}, SEPARATOR),
    (NGPT, {"attention": ALiBi()}, SEPARATOR),
    (AnGPT, {"attention": ScaleInvariant()}, SEPARATOR),
    (AnGPT, {"attention": SqrtLogN()}, Separator(END, "start")),
    (GPT, {"attention": SHIPPED["pattern"]}, SEPARATOR),
    (NGPT, {"attention": WINDOW, "document_masking": False}, SEPARATOR),
    (GPT, {"positions": DynamicNTK(training_length=16)}, SEPARATOR),  # they follow the length of the whole sequence
], ids=["plain", "alibi", "scale-invariant", "a separator at the start", "pattern", "unmasked window",
        "dynamic NTK"])  # fmt: skip
@torch.no_grad()
def test_the_same_tokens_with_and_without_the_cache(
    architecture, settings, separator: Separator, n: int
) -> None:
    """One forward pass over prompt and continuation chooses the same token at every place."""
    model = decoder(architecture, **settings)
    for sampling in (Endless(temperature=0), Endless(seed=4)):
        for request, own in zip(
            REQUESTS, generate(model, REQUESTS, n, sampling, separator), strict=True
        ):
            assert len(own.tokens) == n
            tokens = np.array([[*request.prompt, *own.tokens]])
            ids = document_ids(tokens, separator.token, separator.at)
            logits = model(torch.from_numpy(tokens), torch.from_numpy(ids))[
                0, len(request.prompt) - 1 : -1
            ]
            chosen = sampling.draw(logits, sampling.uniforms(request.sample, n))
            assert chosen.tolist() == own.tokens
            chances = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(own.log_likelihood, dtype=torch.float64), chances
            )


def test_the_size_of_the_batch_changes_nothing() -> None:
    """Tokens are told as they come, and only those that have a text are drawn."""
    model = decoder(AnGPT, attention=ScaleInvariant())
    many = [Request(prompt, sample) for prompt in PROMPTS for sample in range(2)]
    together = generate(model, many, 40, SAMPLED, SEPARATOR, 8, 20)
    for batch_size in (1, 4):
        told: list[tuple[int, int]] = []
        apart = generate(
            model,
            many,
            40,
            SAMPLED,
            SEPARATOR,
            batch_size,
            20,
            lambda *event, told=told: told.append(event),
        )
        assert [own.tokens for own in apart] == [own.tokens for own in together]
        assert [[token for own, token in told if own == n] for n in range(8)] == [
            own.tokens for own in apart
        ]
        assert len({number for number, _ in told[: 2 * batch_size]}) == batch_size
    assert generate(model, [many[4]], 40, SAMPLED, SEPARATOR, 8, 20)[0].tokens == together[4].tokens
    assert len({tuple(own.tokens) for own in together}) == 8
    assert {own.finish for own in together} == {"end_of_document", "length"}
    assert {token for own in together for token in own.tokens} <= {*range(20)} - {END}


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
    assert shares(top_p=0.66) == pytest.approx(
        [0, two[0], two[1], 0], abs=0.01
    )  # the largest has 0.657
    assert shares(top_p=0.65) == [0, 1, 0, 0]
    assert shares(temperature=0) == [0, 1, 0, 0]
    assert shares(top_k=100, top_p=1.0) == shares()


@pytest.mark.parametrize(("prompt", "max_tokens", "sentence"), [
    ([], 5, "the prompt is empty"), ([1, 29], 5, "the token 29, .* 0 to 28"), ([4], 5, "logits are not finite"),
    ([1], 10**12, r"5 × 17 tokens do not fit into .* smaller --batch_size or --max_tokens"),
], ids=["empty", "beyond", "damaged", "long"])  # fmt: skip
def test_wrong_prompts_are_refused_before_anything_is_generated(
    prompt, max_tokens: int, sentence: str
) -> None:
    told: list[object] = []
    model = decoder(GPT)
    if prompt == [4]:
        model.head.weight.data[4, 4] = torch.nan
    with pytest.raises(UserError, match=sentence):
        generate(
            model,
            [*REQUESTS, Request(prompt)],
            max_tokens,
            GREEDY,
            on_token=lambda *event: told.append(event),
        )
    assert not told

"""Every token's log-likelihood is that of a forward pass over its window, however windows are batched."""

import numpy as np
import pytest
import torch

from anlit import GPT, AnGPT, DynamicNTK, LogN, ScaleInvariant
from anlit.errors import UserError
from anlit.inference.generation import Ending
from anlit.inference.scoring import Scores, score, windows
from anlit.models.decoder import Decoder
from tests.models.tiny import jolt, random_tokens, tiny

LENGTH, STRIDE, END = 16, 6, 3
DOCUMENTS = [random_tokens(n, seed=n).numpy() for n in (1, 2, 15, 16, 17, 40, 3)]


def decoder(architecture=AnGPT, **changes) -> Decoder:
    return jolt(tiny(architecture, **{"attention": ScaleInvariant(), **changes})).double().eval().model


def by_hand(model: Decoder, tokens: np.ndarray, separator: int | None, seen: bool) -> list[tuple[float, int, int]]:
    """(log-likelihood, rank, context) of each token, each by a forward pass of its own over its window."""
    found = []
    for place in range(len(tokens)):
        row = tokens if separator is None else np.concatenate(([separator], tokens))
        target = place if separator is None else place + 1  # its index in the row
        if target == 0:
            found.append((np.nan, 0, 0))
            continue
        window = next(one for one in windows(len(row) - 1, LENGTH, STRIDE) if one.first < target <= one.end)
        inputs = row[window.begin : target]
        if separator is not None and window.begin == 0 and len(inputs) > 1 and not seen:
            inputs = inputs[1:]
        with torch.no_grad():
            logits = model(torch.from_numpy(inputs)[None])[0, -1].log_softmax(-1)
        begin = max(0, window.begin - (separator is not None))
        found.append((logits[row[target]].item(), int((logits > logits[row[target]]).sum()) + 1, place - begin))
    return found


def assert_equal(found: list[Scores], expected: list[list[tuple[float, int, int]]]) -> None:
    assert len(found) == len(expected)
    for scores, own in zip(found, expected, strict=True):
        np.testing.assert_allclose(scores.log_likelihood, [one[0] for one in own], rtol=1e-5, atol=1e-5)
        assert scores.rank.tolist() == [one[1] for one in own]
        assert scores.n_context.tolist() == [one[2] for one in own]


@pytest.mark.parametrize(
    ("ending", "changes", "seen"),
    [
        (Ending(END, "end"), {}, False),
        (Ending(END, "start"), {}, True),
        (Ending(END, "end"), {"document_masking": False}, True),
        (Ending(), {"attention": LogN()}, True),
    ],
    ids=["end", "start", "unmasked", "no separator"],
)
def test_scores_are_those_of_single_passes(ending: Ending, changes, seen: bool) -> None:
    model = decoder(**changes)
    documents = [np.where(tokens == END, END + 1, tokens) for tokens in DOCUMENTS]
    expected = [by_hand(model, tokens, ending.token, seen) for tokens in documents]
    for batch_size in (1, 3, None):
        assert_equal(list(score(model, documents, LENGTH, STRIDE, ending, batch_size)), expected)


def test_every_token_is_scored_once_with_the_promised_context() -> None:
    for length, stride in ((16, 1), (16, 6), (16, 16), (1, 1)):
        for n in (1, 15, 16, 17, 100):
            found = list(windows(n, length, stride))
            assert [place for one in found for place in range(one.first, one.end)] == list(range(n))
            assert all(one.end - one.begin <= length for one in found)
            assert all(one.begin == 0 or one.first - one.begin >= length - stride for one in found)


def test_positions_that_follow_the_length_do_not_depend_on_the_batch() -> None:
    model = decoder(GPT, positions=DynamicNTK(training_length=8))
    together = list(score(model, DOCUMENTS, LENGTH, STRIDE))
    for tokens, scores in zip(DOCUMENTS, together, strict=True):
        (alone,) = score(model, [tokens], LENGTH, STRIDE, batch_size=1)
        np.testing.assert_allclose(alone.log_likelihood, scores.log_likelihood, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_scored_is_refused() -> None:
    model = decoder()
    for stride in (0, LENGTH + 1):
        with pytest.raises(UserError, match=f"--stride {stride} must be between 1 and the window's 16"):
            list(score(model, DOCUMENTS, LENGTH, stride))
    with pytest.raises(UserError, match="the token 29, but the model knows 0 to 28 only"):
        list(score(model, [np.array([1, 29])], LENGTH))
    with torch.no_grad():
        model.head.weight[4, 4] = torch.nan
    with pytest.raises(UserError, match="logits are not finite"):
        list(score(model, DOCUMENTS, LENGTH))

"""Continuations scored with shared contexts are those of whole sequences, whatever shares a batch."""

import numpy as np
import pytest
import torch

from anlit import GPT, NGPT, AnGPT, DynamicNTK, PRoPE
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.inference.continuations import Pair, Score, score_continuations
from anlit.inference.generation import Ending
from tests.attention.examples import SHIPPED
from tests.inference.huggingface_folders import decoded, loud
from tests.models.tiny import SIZE, tiny

END = 3
LENGTH = SIZE["context_length"]


def some_pairs(seed: int = 0, separators: bool = False) -> list[Pair]:
    """Questions with several answers each, of many lengths, some longer than the model reads."""
    rng = np.random.default_rng(seed)
    pairs = []
    for n_context in (1, 5, 12, 12, 15, 24, 5):
        context = rng.integers(4, SIZE["vocab_size"], n_context)
        if separators:
            context[:1] = END
        pairs += [Pair(context.tolist(), rng.integers(4, SIZE["vocab_size"], n).tolist()) for n in (1, 4, 2, 1, 7)]
    return [pairs[number] for number in rng.permutation(len(pairs))]


@torch.no_grad()
def directly(decoder, pair: Pair, ids_of=None) -> Score:
    """One whole sequence, read without a cache."""
    row = np.array([*pair.context, *pair.continuation])[-(LENGTH + 1) :]
    n = len(pair.continuation)
    ids = None if ids_of is None else torch.from_numpy(ids_of(row[None, :-1]))
    logits = decoder(torch.from_numpy(row[None, :-1]), ids)[0, -n:]
    targets = torch.tensor(pair.continuation)
    chances = logits.log_softmax(-1).gather(-1, targets[:, None])
    return Score(chances.sum().item(), bool((logits.argmax(-1) == targets).all()))


def assert_close(found: list[Score], expected: list[Score]) -> None:
    assert [score.is_greedy for score in found] == [score.is_greedy for score in expected]
    np.testing.assert_allclose([s.log_likelihood for s in found], [s.log_likelihood for s in expected], rtol=1e-4)


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
@pytest.mark.parametrize("mechanism", ["plain", "scale-invariant", "sqrt log n", "window, log n"])
def test_scores_are_those_of_whole_sequences(architecture, mechanism) -> None:
    decoder = loud(architecture, attention=SHIPPED[mechanism], positions=PRoPE()).model.eval()
    pairs = some_pairs()
    for pair in pairs[::6]:
        likely = decoded(decoder, torch.tensor([pair.context[-8:]]), 3)[0, -3:].tolist()
        pairs += [Pair(pair.context[-8:], likely), Pair(pair.context[-8:], [*likely[:2], likely[2] ^ 1])]
    expected = [directly(decoder, pair) for pair in pairs]
    assert 5 < sum(score.is_greedy for score in expected) < len(pairs) - 5
    for batch_size in (1, 3, 64):
        assert_close(score_continuations(decoder, pairs, LENGTH, batch_size), expected)


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.parametrize("masking", [True, False])
def test_a_separator_in_front_is_seen_as_in_training(at, masking) -> None:
    decoder = loud(GPT, document_masking=masking).model.eval()
    pairs = some_pairs(separators=True)
    expected = [directly(decoder, pair, lambda row: document_ids(row, END, at)) for pair in pairs]
    assert_close(score_continuations(decoder, pairs, LENGTH, 4, Ending(END, at)), expected)


def test_positions_that_follow_the_length_do_not_depend_on_the_batch() -> None:
    decoder = loud(GPT, positions=DynamicNTK(training_length=6)).model.eval()
    pairs = some_pairs()
    one, many = (score_continuations(decoder, pairs, LENGTH, size) for size in (1, 64))
    assert_close(one, many)


def test_a_context_is_read_once() -> None:
    decoder = tiny(GPT).model.eval()
    n_read = []
    handle = decoder.embedding.register_forward_hook(lambda module, inputs, output: n_read.append(inputs[0].numel()))
    context = list(range(4, 16))
    told: list[int] = []
    score_continuations(decoder, [Pair(context, [n, n]) for n in range(5)], LENGTH, 8, tell=told.append)
    handle.remove()
    assert n_read == [12, 5]
    assert told == [5]


def test_what_cannot_be_scored_is_refused() -> None:
    decoder = tiny(GPT).model.eval()
    for pair, complaint in (
        (Pair([], [1]), "empty"),
        (Pair([1], []), "empty"),
        (Pair([1], [29]), "the token 29"),
        (Pair([1], [2] * (LENGTH + 1)), "does not fit 16: set --length"),
    ):
        with pytest.raises(UserError, match=complaint):
            score_continuations(decoder, [pair], LENGTH)
    decoder.head.weight.data[0] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        score_continuations(decoder, [Pair([1], [2])], LENGTH)

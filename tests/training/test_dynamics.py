"""The callback that logs norms, steps and rotations: its values."""

import math

import pytest
import torch

from anlit import GPT, NGPT, AnGPT
from anlit.training.callbacks.dynamics import angles, copying, hidden_states, rotations, share_at_bound
from tests.models.tiny import batches, jolt, tiny


def test_a_rotation_is_the_angle_between_a_row_before_and_after() -> None:
    old = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    for angle in (1e-7, 0.3, 3.0):
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        measured = angles(old, 5 * old.double() @ turn.T)
        assert measured[:2].tolist() == pytest.approx([angle, angle], rel=1e-6)
        assert measured[2].isnan()
    values = rotations([("W_q", old), ("W_q", old)], [old, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])])
    assert values == {"rotation/W_q": pytest.approx(math.pi / 2 / 4)}, "rows of zeros do not count"


def test_hidden_states_are_those_between_the_blocks() -> None:
    model = jolt(tiny(GPT)).eval()
    batch = next(iter(batches(4, 16)))
    h = [model.model.embedding(batch.tokens[:2])]
    handles = [block.register_forward_hook(lambda *arguments: h.append(arguments[2])) for block in model.model.blocks]
    with torch.no_grad():
        values = hidden_states(model, batch, 2)
        for handle in handles:
            handle.remove()
    for number in range(2):
        before, after = h[number], h[number + 1]
        norms = after.square().sum(-1).sqrt()
        name = f"hidden/layer_0{number}"
        assert values[f"{name}/norm"] == pytest.approx(norms.mean().item(), rel=1e-5)
        assert values[f"{name}/norm_spread"] == pytest.approx((norms.std() / norms.mean()).item(), rel=1e-4)
        step = (after - before).square().sum(-1).sqrt() / before.square().sum(-1).sqrt()
        assert values[f"{name}/step"] == pytest.approx(step.mean().item(), rel=1e-5)
    assert len(values) == 6


def test_norms_of_ngpt_are_1_and_a_shrunken_row_of_angpt_is_not_at_its_bound() -> None:
    with torch.no_grad():
        assert hidden_states(tiny(NGPT), next(iter(batches(4, 16))), 2)["hidden/layer_01/norm"] == pytest.approx(1)
    shares = [share_at_bound(tiny(kind).model) for kind in (GPT, NGPT, AnGPT)]
    assert shares == [{}, {"norms/share_at_bound": 1.0}, {"norms/share_at_bound": 1.0}]
    model = tiny(AnGPT).model
    model.blocks[0].W_q.weight.data[:16].mul_(0.5)
    n_rows = sum(len(rows) for rows in model.row_norms())
    assert share_at_bound(model) == {"norms/share_at_bound": pytest.approx(1 - 16 / n_rows)}


def test_copying_compares_random_tokens_with_their_copy() -> None:
    """Against a loop over positions; and a stand-in that repeats what it saw is certain of the second copy alone."""
    model = jolt(tiny(GPT)).eval()
    cpu = torch.device("cpu")
    with torch.no_grad():
        values = copying(model, 17, 2, cpu)
        once = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(0))
        tokens = torch.cat([once, once], dim=1)
        log_p = model(tokens).log_softmax(-1)
    for name, places in (("first", range(1, 8)), ("second", range(9, 16))):
        losses = [-log_p[row, place - 1, tokens[row, place]].item() for row in range(2) for place in places]
        assert values[f"copying/{name}"] == pytest.approx(sum(losses) / 14, rel=1e-6)

    class Copier:
        vocab_size = 29

        def __call__(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
            logits = 30 * torch.nn.functional.one_hot(tokens.roll(7, dims=1), 29).double()
            logits[:, :7] = 0  # nothing is 8 tokens back
            return logits

    losses = copying(Copier(), 16, 2, cpu)
    assert losses["copying/second"] < 1e-6
    assert losses["copying/first"] == pytest.approx(math.log(29))
    assert copying(Copier(), 3, 2, cpu) == {}

"""The callback that logs norms, steps and rotations: its values, its steps, and that training does not notice."""

import math
from typing import Any

import pytest
import torch

from anlit import GPT, NGPT, AnGPT
from anlit.errors import UserError
from anlit.training.callbacks import TrainingDynamics
from anlit.training.callbacks.dynamics import angles, hidden_states, rotations, share_at_bound
from tests.models.tiny import ARCHITECTURES, batches, fit, jolt, tiny
from tests.training.test_attention_statistics import Recorder, Trajectory


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_is_the_same_to_the_bit_with_and_without(architecture: Any) -> None:
    runs = []
    for callbacks in ([], [TrainingDynamics(every_n_steps=2, sequences=2)]):
        trajectory, recorder = Trajectory(), Recorder()
        model = tiny(architecture, dropout=0.2)
        fit(model, 4, accumulate=2, callbacks=[*callbacks, trajectory], logger=recorder, log_every_n_steps=1)
        assert recorder.steps_with("hidden/layer_01/norm") == ([1, 3] if callbacks else [])
        assert recorder.steps_with("rotation/W_d") == ([1, 3] if callbacks else [])
        runs.append((trajectory, model.state_dict()))
    (before, weights), (after, same_weights) = runs
    assert before.losses == after.losses
    assert all(torch.equal(*states) for states in zip(before.states, after.states, strict=True))
    assert all(torch.equal(weight, same_weights[name]) for name, weight in weights.items())


def test_a_rotation_is_the_angle_between_a_row_before_and_after() -> None:
    old = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    for angle in (1e-7, 0.3, 3.0):
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        found = angles(old, 5 * old.double() @ turn.T)
        assert found[:2].tolist() == pytest.approx([angle, angle], rel=1e-6)
        assert found[2].isnan()
    values = rotations([("W_q", old), ("W_q", old)], [old, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])])
    assert values == {"rotation/W_q": pytest.approx(math.pi / 2 / 4)}, "rows of zeros do not count"


def test_hidden_states_are_those_between_the_blocks() -> None:
    model = jolt(tiny(GPT)).eval()
    batch = next(iter(batches(4, 16)))
    h = [model.model.embedding(batch.tokens[:2])]
    handles = [block.register_forward_hook(lambda *found: h.append(found[2])) for block in model.model.blocks]
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
    batch = next(iter(batches(4, 16)))
    with torch.no_grad():
        values = hidden_states(tiny(NGPT), batch, 2)
        assert values["hidden/layer_01/norm"] == pytest.approx(1, abs=1e-5)
        assert share_at_bound(tiny(NGPT).model) == {"norms/share_at_bound": 1.0}
        assert share_at_bound(tiny(GPT).model) == {}
        model = tiny(AnGPT).model
        assert share_at_bound(model) == {"norms/share_at_bound": 1.0}
        model.blocks[0].W_q.weight[:16].mul_(0.5)
        n_rows = sum(len(rows) for rows in model.row_norms())
        assert share_at_bound(model) == {"norms/share_at_bound": pytest.approx(1 - 16 / n_rows)}


@pytest.mark.parametrize("settings", [{"every_n_steps": 0}, {"sequences": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UserError, match="both must be at least 1"):
        TrainingDynamics(**settings)

"""The callbacks that measure between steps: training notices neither; what the values are."""

import math
from typing import Any

import lightning as L
import pytest
import torch

from anlit import GPT, NGPT, AnGPT, ScaleInvariant
from anlit.attention.observation import attention_layers
from anlit.errors import UserError
from anlit.training.callbacks import AttentionStatistics, TrainingDynamics
from anlit.training.callbacks.attention_statistics import layer_statistics
from anlit.training.callbacks.dynamics import angles, copying, hidden_states, rotations, share_at_bound
from tests.models.tiny import ARCHITECTURES, batches, fit, jolt, tiny
from tests.training.recorder import Recorder


class Trajectory(L.Callback):
    """Losses as training sees them, and the state of the random numbers after each micro-batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.states: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.states.append(torch.get_rng_state())


OBSERVERS = {
    AttentionStatistics: ["attention/layer_01/entropy"],
    TrainingDynamics: ["hidden/layer_01/norm", "rotation/W_d", "copying/second"],
}
"""And some of what each of them logs."""


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_is_the_same_to_the_bit_with_and_without(architecture: Any, observer: Any) -> None:
    """With dropout, in one block alone, accumulation, QK-clip and packed documents; after every 2nd step, from 0."""
    runs = []
    for callbacks in ([], [observer(every_n_steps=2, sequences=2)]):
        trajectory, recorder = Trajectory(), Recorder()
        settings = {"dropout": 0.2, "qk_clip": 0.5, "qk_norm_gain": True}
        model = tiny(architecture, attention=ScaleInvariant(learned="per_layer"), **settings)
        model.model.blocks[0].eval()
        fit(model, 4, accumulate=2, callbacks=[*callbacks, trajectory], logger=recorder, log_every_n_steps=1)
        assert recorder.steps_with("train/loss") == [0, 1, 2, 3]
        assert all(recorder.steps_with(name) == ([1, 3] if callbacks else []) for name in OBSERVERS[observer])
        assert [block.training for block in model.model.blocks] == [False, True]
        runs.append((trajectory, model.state_dict()))
    (before, weights), (after, same_weights) = runs
    assert before.losses == after.losses
    assert len(set(before.losses)) == 8
    assert all(torch.equal(*states) for states in zip(before.states, after.states, strict=True))
    assert not torch.equal(before.states[0], before.states[-1]), "dropout draws numbers"
    assert all(torch.equal(weight, same_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("setting", ["every_n_steps", "sequences"])
def test_settings_out_of_range_are_refused(observer: Any, setting: str) -> None:
    with pytest.raises(UserError, match=f"{observer.__name__} has {setting}=0: it must be at least 1"):
        observer(**{setting: 0})


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_values_are_means_over_heads_and_queries(low: bool) -> None:
    """From q and k in the precision of training, but with float32 from there on."""
    model = jolt(tiny(GPT)).eval()
    batch = next(iter(batches(4, 16)))
    captured: list[Any] = []
    layers = attention_layers(model)
    handles = [layer.register_forward_pre_hook(lambda _, arguments: captured.append(arguments)) for layer in layers]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        model(batch.tokens[:2], batch.document_ids[:2])
        for handle in handles:
            handle.remove()
        values = layer_statistics(model, batch, 2)
    for number, (q, k, _, documents) in enumerate(captured):
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~documents.mask(), -math.inf).softmax(-1)
        heads = torch.special.entr(weights).sum(-1).mean((0, 2))
        logged = [values[f"attention/layer_0{number}/entropy{which}"] for which in ("", "_min", "_max")]
        assert logged == pytest.approx([heads.mean().item(), heads.min().item(), heads.max().item()], rel=1e-5)
        near = weights.diagonal(dim1=-2, dim2=-1).mean().item()
        assert values[f"attention/layer_0{number}/weight_0_to_1"] == pytest.approx(near, rel=1e-5)
    assert f"attention/layer_0{len(layers)}/entropy" not in values
    assert all(isinstance(value, float) and math.isfinite(value) for value in values.values())


def test_it_runs_in_the_precision_of_training() -> None:
    recorder = Recorder()
    fit(tiny(GPT), 1, callbacks=[AttentionStatistics(1)], logger=recorder, precision="bf16-mixed")
    assert recorder.rows[0]["attention/layer_00/weight_latest_100"] == pytest.approx(1, abs=1e-6)


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

"""The callbacks that measure between steps: training notices neither; what the values are."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from anlit import GPT, NGPT, AnGPT, ScaleInvariant
from anlit.errors import UserError
from anlit.io.read import read_rows
from anlit.nn.attention.observe import attention_layers
from anlit.training.callbacks import AttentionStatistics, TrainingDynamics
from anlit.training.callbacks.attention_statistics import layer_statistics
from anlit.training.callbacks.dynamics import (
    angles,
    copying,
    hidden_states,
    rotations,
    share_at_bound,
)
from anlit.training.loggers import MetricsCSV
from tests.nn.models.tiny import ARCHITECTURES, batches, fit, jolt, tiny


class Trajectory(L.Callback):
    """Losses as training sees them, and the state of the random numbers after each micro-batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.states: list[torch.Tensor] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        self.states.append(torch.get_rng_state())


OBSERVERS = {
    AttentionStatistics: ["attention/layer_01/entropy"],
    TrainingDynamics: ["hidden/layer_01/norm", "rotation/W_d", "copying/second"],
}
"""And some of what each of them logs."""


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_is_the_same_to_the_bit_with_and_without(
    architecture: Any, observer: Any, tmp_path: Path
) -> None:
    """With dropout, in one block alone, accumulation, QK-clip and packed documents; after every 2nd step, from 0."""
    runs = []
    for folder, callbacks in (("without", []), ("with", [observer(every_n_steps=2, sequences=2)])):
        trajectory, logger = Trajectory(), MetricsCSV(str(tmp_path / folder))
        settings = {"dropout": 0.2, "qk_clip": 0.5, "qk_norm_gain": True}
        model = tiny(architecture, attention=ScaleInvariant(learned="per_layer"), **settings)
        model.model.blocks[0].eval()
        fit(
            model,
            4,
            accumulate=2,
            callbacks=[*callbacks, trajectory],
            logger=logger,
            log_every_n_steps=1,
        )
        rows = read_rows(logger.path)
        for name in OBSERVERS[observer]:
            assert [row["step"] for row in rows if row.get(name)] == (
                ["1", "3"] if callbacks else []
            )
        assert [block.training for block in model.model.blocks] == [False, True]
        runs.append((trajectory, model.state_dict()))
    (before, weights), (after, same_weights) = runs
    assert before.losses == after.losses
    assert len(set(before.losses)) == 8
    assert not torch.equal(before.states[0], before.states[-1]), "dropout draws numbers"
    torch.testing.assert_close(
        (before.states, weights), (after.states, same_weights), rtol=0, atol=0
    )


@pytest.mark.parametrize("observer", OBSERVERS)
def test_settings_out_of_range_are_refused(observer: Any) -> None:
    for setting in ("every_n_steps", "sequences"):
        with pytest.raises(
            UserError, match=f"{observer.__name__} has {setting}=0: it must be at least 1"
        ):
            observer(**{setting: 0})


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_values_are_means_over_heads_and_queries(low: bool) -> None:
    """From q and k in the precision of training, but with float32 from there on."""
    model, batch, captured = jolt(tiny(GPT)).eval(), next(iter(batches(4, 16))), list[Any]()
    for layer in attention_layers(model):
        layer.register_forward_pre_hook(lambda _, arguments: captured.append(arguments))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        values = layer_statistics(model, batch, 2)
    for number, (q, k, _, documents) in enumerate(captured):
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~documents.mask(), -math.inf).softmax(-1)
        heads = torch.special.entr(weights).sum(-1).mean((0, 2))
        logged = [
            values[f"attention/layer_0{number}/entropy{which}"] for which in ("", "_min", "_max")
        ]
        assert logged == pytest.approx(
            [heads.mean().item(), heads.min().item(), heads.max().item()], rel=1e-5
        )
        near = weights.diagonal(dim1=-2, dim2=-1).mean().item()
        assert values[f"attention/layer_0{number}/weight_0_to_1"] == pytest.approx(near, rel=1e-5)
    assert len(captured) == 2
    assert all(math.isfinite(value) for value in values.values())


def test_a_rotation_is_the_angle_between_a_row_before_and_after() -> None:
    old = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    for angle in (1e-7, 0.3, 3.0):
        turn = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        ).double()
        measured = angles(old, 5 * old.double() @ turn.T)
        assert measured.tolist() == pytest.approx([angle, angle, math.nan], rel=1e-6, nan_ok=True)
    values = rotations(
        [("W_q", old), ("W_q", old)], [old, torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])]
    )
    assert values == {"rotation/W_q": pytest.approx(math.pi / 2 / 4)}, "rows of zeros do not count"


def test_hidden_states_are_those_between_the_blocks() -> None:
    model, batch = jolt(tiny(GPT)).eval(), next(iter(batches(4, 16)))
    h = [model.model.embedding(batch.tokens[:2])]
    for block in model.model.blocks:
        block.register_forward_hook(lambda *arguments: h.append(arguments[2]))
    with torch.no_grad():
        values = hidden_states(model, batch, 2)
    expected = {}
    for number, (before, after) in enumerate(pairwise(h)):
        norms, step = after.norm(dim=-1), (after - before).norm(dim=-1) / before.norm(dim=-1)
        each = {
            "norm": norms.mean(),
            "norm_spread": norms.std() / norms.mean(),
            "step": step.mean(),
        }
        expected |= {f"hidden/layer_0{number}/{name}": value.item() for name, value in each.items()}
    assert values == pytest.approx(expected, rel=1e-4)


def test_norms_of_ngpt_are_1_and_a_shrunken_row_of_angpt_is_not_at_its_bound() -> None:
    with torch.no_grad():
        assert hidden_states(tiny(NGPT), next(iter(batches(4, 16))), 2)[
            "hidden/layer_01/norm"
        ] == pytest.approx(1)
    assert [share_at_bound(tiny(kind).model) for kind in (GPT, NGPT)] == [
        {},
        {"norms/share_at_bound": 1.0},
    ]
    model = tiny(AnGPT).model
    model.blocks[0].W_q.weight.data[:16].mul_(0.5)
    n_rows = sum(len(rows) for rows in model.row_norms())
    assert share_at_bound(model) == {"norms/share_at_bound": pytest.approx(1 - 16 / n_rows)}


def test_copying_compares_random_tokens_with_their_copy() -> None:
    model, cpu = jolt(tiny(GPT)).eval(), torch.device("cpu")
    with torch.no_grad():
        values = copying(model, 17, 2, cpu)
        tokens = torch.randint(29, (2, 8), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
        log_p = model(tokens).log_softmax(-1)
    for name, places in (("first", range(1, 8)), ("second", range(9, 16))):
        losses = [
            -log_p[row, place - 1, tokens[row, place]].item()
            for row in range(2)
            for place in places
        ]
        assert values[f"copying/{name}"] == pytest.approx(sum(losses) / 14, rel=1e-6)
    assert copying(model, 3, 2, cpu) == {}

"""The callbacks that measure between steps do not change training; values match formulas."""

import math
import os
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from anlit import GPT, NGPT, AnGPT, Runtime, ScaleInvariant
from anlit.data.batch import Batch
from anlit.errors import UserError
from anlit.io.metrics_csv import read_rows
from anlit.nn.attention.observe import attention_layers
from anlit.nn.kernels.documents import Documents
from anlit.nn.kernels.formula import distances
from anlit.nn.layers.sharded import full_tensor, local_tensor
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
from tests.data.processes import on_two_devices
from tests.nn.models.tiny import ARCHITECTURES, batches, fit, jolt, tiny


class Trajectory(L.Callback):
    """Keeps losses and states of the random numbers after each micro-batch."""

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
"""A callback → some names that it logs."""


def train_observed(
    architecture: Any, callbacks: list[L.Callback], folder: Path
) -> tuple[Trajectory, dict[str, torch.Tensor], list[dict[str, str]]]:
    """Trajectory, weights and rows of metrics.csv after four steps.

    The run has dropout in a single block, accumulation, QK-clip and packed documents.
    """
    trajectory = Trajectory()
    logger = MetricsCSV(str(folder))
    model = tiny(
        architecture,
        attention=ScaleInvariant(learned="per_layer"),
        dropout=0.2,
        qk_clip=0.5,
        qk_norm_gain=True,
    )
    first_block, second_block = model.model.blocks
    first_block.eval()
    settings = {"callbacks": [*callbacks, trajectory], "logger": logger, "log_every_n_steps": 1}
    fit(model, 4, accumulate=2, **settings)
    assert not first_block.training
    assert second_block.training
    return trajectory, model.state_dict(), list(read_rows(logger.path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_is_the_same_to_the_bit_with_and_without(
    architecture: Any, tmp_path: Path
) -> None:
    observers = [observer(every_n_steps=2, sequences=2) for observer in OBSERVERS]

    expected, weights, _ = train_observed(architecture, [], tmp_path / "without")
    observed, observed_weights, rows = train_observed(architecture, observers, tmp_path / "with")

    for name in chain(*OBSERVERS.values()):
        measured_steps = [row["step"] for row in rows if row.get(name)]
        assert measured_steps == ["1", "3"], name
    assert observed.losses == expected.losses
    assert len(set(expected.losses)) == 8
    first_state, *_, last_state = expected.states
    assert not torch.equal(first_state, last_state), "dropout draws numbers"
    torch.testing.assert_close(observed.states, expected.states, rtol=0, atol=0)
    torch.testing.assert_close(observed_weights, weights, rtol=0, atol=0)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_measurement_compiles_nothing(
    observer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each shape of its batches would take 10 s and more."""
    graphs: list[torch.fx.GraphModule] = []

    def record_graph(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=record_graph))
    model = tiny(GPT, runtime=Runtime(compile=True))

    callbacks = [observer(every_n_steps=1, sequences=2)]
    fit(model, 2, callbacks=callbacks, logger=MetricsCSV(str(tmp_path)))

    of_training = 1
    assert len(graphs) == of_training


def jolted_gpt() -> Any:
    return jolt(tiny(GPT)).eval()


def first_batch() -> Batch:
    loader = batches(4, 16)
    return next(iter(loader))


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("setting", ["every_n_steps", "sequences"])
def test_settings_out_of_range_are_refused(observer: Any, setting: str) -> None:
    message = f"{observer.__name__} has {setting}=0: it must be at least 1"
    with pytest.raises(UserError, match=message):
        observer(**{setting: 0})


@pytest.mark.parametrize("is_low", [False, True], ids=["float32", "bfloat16"])
def test_values_are_means_over_heads_and_queries(is_low: bool) -> None:
    """q and k have the precision of training; all later values are in float32."""
    model = jolted_gpt()
    batch = first_batch()
    inputs: list[Any] = []
    for layer in attention_layers(model):
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    precision = torch.autocast("cpu", torch.bfloat16, enabled=is_low)

    with torch.no_grad(), precision:
        values = layer_statistics(model, batch, 2)

    assert len(inputs) == 2
    assert all(map(math.isfinite, values.values()))
    for number, (q, k, _, documents) in enumerate(inputs):
        for name, value in naive_statistics(q, k, documents).items():
            logged = values[f"attention/layer_0{number}/{name}"]
            assert logged == pytest.approx(value.item(), rel=1e-5)


def naive_statistics(q: Tensor, k: Tensor, documents: Documents) -> dict[str, Tensor]:
    """The statistics of plain attention from all of its weights. q, k: (B, H, T, D)."""
    *_, d_head = q.shape
    scores = q.double() @ k.double().mT / math.sqrt(d_head)
    is_visible = documents.sees(0, distances(16, 16, q.device), None)
    scores = scores.masked_fill(~is_visible, -math.inf)
    weights = scores.softmax(-1)  # (B, H, T, T)
    entropies = torch.special.entr(weights).sum(-1)
    means = entropies.mean((0, 2))  # (H,)
    weights_of_own_position = weights.diagonal(dim1=-2, dim2=-1)
    return {
        "entropy": means.mean(),
        "entropy_min": means.min(),
        "entropy_max": means.max(),
        "weight_0_to_1": weights_of_own_position.mean(),
    }


ROWS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])


@pytest.mark.parametrize("angle", [1e-7, 0.3, 3.0])
def test_the_angle_between_old_and_new_rows_is_exact(angle: float) -> None:
    cosine = math.cos(angle)
    sine = math.sin(angle)
    turn = torch.tensor([[cosine, -sine], [sine, cosine]], dtype=torch.float64)
    turned_rows = 5 * ROWS.double() @ turn.T

    measured = angles(ROWS, turned_rows)

    assert measured.tolist() == pytest.approx([angle, angle, math.nan], rel=1e-6, nan_ok=True)


def test_rotation_is_a_mean_over_rows_that_are_not_zero() -> None:
    turned = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    old_matrices = [("W_q", ROWS), ("W_q", ROWS)]

    values = rotations(old_matrices, [ROWS, turned])

    assert values == {"rotation/W_q": pytest.approx(math.pi / 2 / 4)}


def test_a_rank_keeps_its_rows_of_sharded_matrices_alone() -> None:
    """A copy of a whole model that needs sharding does not fit."""
    for of_shards, of_whole_matrices, share in on_two_devices(rotations_of_rank):
        assert of_shards == pytest.approx(of_whole_matrices, rel=1e-12)
        assert share == pytest.approx(0.5, abs=0.02)


def rotations_of_rank() -> tuple[dict[str, float], dict[str, float], float]:
    """Rotations by shards and by whole matrices, and the share of the matrices that is kept."""
    rank = int(os.environ["LOCAL_RANK"])
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = tiny(NGPT)
    fully_shard(model.model, mesh=init_device_mesh("cpu", (2,)))
    observer: Any = TrainingDynamics(every_n_steps=1)
    observer.on_before_optimizer_step(SimpleNamespace(global_step=0), model, None)
    old = observer._old_matrices
    old_whole = [(name, full_tensor(matrix).clone()) for name, matrix in old]
    n_kept = sum(local_tensor(matrix).untyped_storage().nbytes() for _, matrix in old)
    n_bytes = sum(matrix.nbytes for _, matrix in old_whole)

    generator = torch.Generator().manual_seed(rank)
    new = [matrix.detach() for _, matrix in model.model.matrices()]
    for matrix in new:
        shard = local_tensor(matrix)
        shard.add_(0.1 * torch.randn(shard.shape, generator=generator))
    new_whole = [full_tensor(matrix) for matrix in new]
    of_shards = rotations(old, new)
    of_whole_matrices = rotations(old_whole, new_whole)
    distributed.destroy_process_group()
    return of_shards, of_whole_matrices, n_kept / n_bytes


def test_hidden_states_are_measured_between_the_blocks() -> None:
    model = jolted_gpt()
    batch = first_batch()
    states = [model.model.embedding(batch.tokens[:2])]
    for block in model.model.blocks:
        block.register_forward_hook(lambda _, inputs, output: states.append(output))

    with torch.no_grad():
        values = hidden_states(model, batch, 2)

    expected = {}
    for number, (h, new_h) in enumerate(pairwise(states)):
        prefix = f"hidden/layer_0{number}"
        norms = new_h.norm(dim=-1)
        mean = norms.mean()
        changes = (new_h - h).norm(dim=-1)
        steps = changes / h.norm(dim=-1)
        expected[f"{prefix}/norm"] = float(mean)
        expected[f"{prefix}/norm_spread"] = float(norms.std() / mean)
        expected[f"{prefix}/norm_max"] = float(norms.max())
        expected[f"{prefix}/step"] = float(steps.mean())
    assert values == pytest.approx(expected, rel=1e-4)


def test_hidden_states_of_ngpt_have_a_norm_of_1() -> None:
    batch = first_batch()

    with torch.no_grad():
        values = hidden_states(tiny(NGPT), batch, 2)

    assert values["hidden/layer_01/norm"] == pytest.approx(1)


def test_a_shrunken_row_of_angpt_is_not_at_its_bound() -> None:
    model = tiny(AnGPT).model
    n_rows = sum(map(len, model.row_norms()))
    shrunken_rows = model.blocks[0].W_q.weight.data[:16]
    shrunken_rows.mul_(0.5)

    values = share_at_bound(model)

    share = 1 - 16 / n_rows
    assert values == {"norms/share_at_bound": pytest.approx(share)}


def test_all_rows_of_ngpt_are_at_their_bound_and_gpt_has_no_bound() -> None:
    share_of_ngpt = share_at_bound(tiny(NGPT).model)
    share_of_gpt = share_at_bound(tiny(GPT).model)

    assert share_of_ngpt == {"norms/share_at_bound": 1.0}
    assert share_of_gpt == {}


def test_copying_compares_random_tokens_with_their_copy() -> None:
    model = jolted_gpt()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(29, (2, 8), generator=generator)
    tokens = text.repeat(1, 2)

    with torch.no_grad():
        values = copying(model, 17, 2, torch.device("cpu"))
        logits = model(tokens[:, :-1])

    losses = cross_entropy(logits.mT, tokens[:, 1:], reduction="none")  # (2, 15)
    first = losses[:, :7].mean().item()
    second = losses[:, 8:].mean().item()
    expected = {"copying/first": first, "copying/second": second}
    assert values == pytest.approx(expected, rel=1e-6)


def test_copying_needs_four_tokens() -> None:
    values = copying(tiny(GPT), 3, 2, torch.device("cpu"))

    assert values == {}

"""The losses of `anlit lengths` at every length, and the arms that its checkpoints make."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from anlit import GPT, AnGPT, TokenShards
from anlit.evaluation import lengths as lengths_module
from anlit.evaluation.data import load_validation_data
from anlit.evaluation.lengths import Lengths, token_losses
from anlit.evaluation.runner import group_by_seed, load_checkpoints
from anlit.evaluation.settings import LengthsSettings
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.modules import quiet_trainer
from tests.data.prepared import VOCABULARY, write_prepared
from tests.evaluation.length_results import Result, find, total_loss
from tests.evaluation.saved import (
    LENGTH,
    VAL_TOKENS,
    load_with_data,
    make_run,
    prepare,
    save,
    small,
)

N_TOKENS = VAL_TOKENS // 64 * 64
"""Targets in complete pieces of 64."""
DOCUMENT_LENGTH = 24
Record = dict[str, Any]
CheckpointAndData = tuple[Checkpoint, TokenShards]


class CountingModel(nn.Module):
    """Predicts documents that count 1, 2, … and end with 0, better at later positions.

    The logit of the right token is ln(1 + p) above all other logits. p is the position that
    attention would know. So the loss is ln(1 + (V − 1)/(1 + p)).
    """

    vocab_size = VOCABULARY
    context_length = LENGTH
    document_masking = True

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    @property
    def model(self) -> nn.Module:
        return self

    def forward(self, tokens: Tensor, document_ids: Tensor) -> Tensor:
        _, length = tokens.shape
        positions = torch.arange(length).expand_as(tokens)
        if self.document_masking:
            positions = Documents(document_ids, length, tokens.device).positions
        next_tokens = (tokens + 1) % DOCUMENT_LENGTH
        return self.logits(torch.stack([next_tokens, positions], -1))

    def logits(self, h: Tensor) -> Tensor:
        right, position = h.unbind(-1)
        lead = torch.log1p(position.double())
        return one_hot(right, VOCABULARY) * lead[..., None]


def exact_loss(position: np.ndarray) -> np.ndarray:
    """The loss of `CountingModel`."""
    return np.log1p((VOCABULARY - 1) / (1 + position))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> CheckpointAndData:
    """A `CountingModel`, and its documents."""
    numbers = np.arange(N_TOKENS + 9) + 1
    tokens = (numbers % DOCUMENT_LENGTH).astype(np.uint16)
    folder = tmp_path_factory.mktemp("data") / "counting"
    write_prepared(folder, {"train": tokens, "val": tokens})
    model: Any = CountingModel()
    checkpoint = Checkpoint(model, Path("counter.ckpt"), 0, None, None, {})
    return checkpoint, load_validation_data(checkpoint, str(folder))


def measure(
    checkpoint: Checkpoint, data: TokenShards, lengths: list[int], *masking: bool, **settings: int
) -> list[Result]:
    evaluation = Lengths(LengthsSettings(tuple(lengths), masking=masking, **settings))
    evaluation.plan([checkpoint], data)
    return evaluation.measure(checkpoint, data)


@pytest.fixture(scope="module")
def results(counting: CheckpointAndData) -> list[Result]:
    """The results on the counting documents, at two lengths, with masking and without."""
    return measure(*counting, [16, 64], True, False, batch_tokens=128)


@pytest.mark.parametrize("length", [16, 64])
@pytest.mark.parametrize("masked", [True, False], ids=["documents", "single text"])
def test_exact_losses_come_out_by_length_and_position(
    results: list[Result], length: int, masked: bool
) -> None:
    result = find(results, length, masked)

    number = np.arange(N_TOKENS)
    position = number % length
    if masked:
        # Documents begin at the tokens 0, 24, 48, … of the split, and anew with each sequence.
        position = np.minimum(position, number % DOCUMENT_LENGTH)
    mean = exact_loss(position).mean()
    bits_per_byte = mean / math.log(2) / 3
    assert len(results) == 4
    assert result["total"]["tokens"] == N_TOKENS
    assert result["sequences"] == N_TOKENS // length
    assert total_loss(result) == pytest.approx(mean, rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte)
    for span in result["by_position"]:
        is_inside = (span["first"] <= position) & (position < span["end"])
        estimate = span["estimate"]
        assert estimate["tokens"] == is_inside.sum()
        if is_inside.any():
            expected = exact_loss(position[is_inside]).mean()
            assert estimate["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("length", [16, 64])
def test_the_standard_error_is_over_pieces_at_every_length(
    results: list[Result], length: int
) -> None:
    """Four sequences of 16 are neighbours in a piece of 64: their losses are not independent."""
    number = np.arange(N_TOKENS)
    position = np.minimum(number % length, number % DOCUMENT_LENGTH)
    losses = exact_loss(position).reshape(-1, 64).mean(1)

    estimate = find(results, length, True)["total"]

    expected = losses.std(ddof=1) / math.sqrt(len(losses))
    assert expected > 0
    assert estimate["standard_error"] == pytest.approx(expected, rel=1e-4)


def test_ranges_of_positions_end_at_powers_of_two(results: list[Result]) -> None:
    spans = find(results, 64, True)["by_position"]

    assert [span["first"] for span in spans] == [0, 1, 2, 4, 8, 16, 32]
    assert [span["end"] for span in spans] == [1, 2, 4, 8, 16, 32, 64]


def test_the_change_is_the_loss_minus_the_loss_at_the_training_length(
    results: list[Result],
) -> None:
    at_training_length = find(results, LENGTH, False)
    longer = find(results, 64, False)

    difference = total_loss(longer) - total_loss(at_training_length)
    change = longer["change"]
    assert change["loss"] == pytest.approx(difference, rel=1e-9)
    # Each piece changes by the same.
    assert change["standard_error"] == pytest.approx(0.0, abs=1e-9)
    assert at_training_length["change"] is None


def test_the_default_lengths_are_multiples_of_the_training_length(run: Path) -> None:
    checkpoints, data = load_checkpoints([str(run)], None, "cpu")

    plan = Lengths(LengthsSettings()).plan(checkpoints, data)

    assert plan["lengths"] == [16, 64, 256]
    assert plan["tokens"] == VAL_TOKENS // 256 * 256


def test_the_loss_at_the_training_length_is_equal_to_validation(run: Path) -> None:
    checkpoint, data = load_with_data(run)
    data.val_tokens = N_TOKENS
    data.val_batch_size = 4
    trainer = quiet_trainer(devices=1)
    (metrics,) = trainer.validate(checkpoint.model, data, verbose=False)

    (result,) = measure(*load_with_data(run), [LENGTH], True)

    assert total_loss(result) == pytest.approx(metrics["val/loss"], rel=1e-6)


def test_a_piece_does_not_reach_from_a_folder_into_the_next(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mixed", data, GPT)
    checkpoint = load_checkpoint(str(run), "cpu")
    assert checkpoint.config is not None
    first = prepare(tmp_path / "a", n_val=101)
    second = prepare(tmp_path / "b", n_val=301)
    paths = {"a": str(first), "b": str(second)}
    checkpoint.config["data"] = {"class_path": "anlit.Mixture", "init_args": {"paths": paths}}
    mixture = load_validation_data(checkpoint)

    short, long = measure(checkpoint, mixture, [16, 64], True)

    assert short["total"]["tokens"] == 384
    assert long["total"]["tokens"] == 384
    assert short["sequences"] == 7 + 18
    assert long["sequences"] == 2 + 5
    difference = total_loss(long) - total_loss(short)
    assert long["change"]["loss"] == pytest.approx(difference, rel=1e-9)


def test_losses_do_not_depend_on_the_rows_that_logits_are_made_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, data = load_with_data(run)
    data.score_first_token = False
    data.setup("validate")
    batch = next(iter(data.val_dataloader()))
    logits = checkpoint.model(batch.tokens, batch.document_ids)
    expected = cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    assert (batch.targets == IGNORE_INDEX).any()

    for max_logits in (1 << 26, 7 * VOCABULARY, 1):
        monkeypatch.setattr(lengths_module, "MAX_LOGITS_AT_ONCE", max_logits)
        losses = token_losses(checkpoint.model, batch)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)

    logits_afterwards = checkpoint.model(batch.tokens, batch.document_ids)
    assert torch.equal(logits_afterwards, logits), "the model has its head again"


def copy_with_initial_weights(run: Path, folder: Path, seed: int) -> Path:
    """A copy of a run, fine-tuned from other weights by its configuration."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["seed_everything"] = seed
    config["initial_weights"] = f"runs/{folder.name}.ckpt"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_runs_that_differ_in_the_seed_are_an_arm(run: Path, data: Path, tmp_path: Path) -> None:
    first_seed = Path(shutil.copytree(run, tmp_path / "gpt-1"))
    second_seed = make_run(tmp_path / "gpt-2", data, GPT, seed=2)
    angpt = make_run(tmp_path / "angpt", data, AnGPT)
    wider = make_run(tmp_path / "wider", data, GPT, d_model=16)
    checkpoints = first_seed / "checkpoints"
    twice = shutil.copy(checkpoints / "best.ckpt", checkpoints / "twice.ckpt")
    alone = save(small(GPT, vocab_size=VOCABULARY), tmp_path / "alone.ckpt")
    finetuned = copy_with_initial_weights(first_seed, tmp_path / "a", 1)
    also_finetuned = copy_with_initial_weights(first_seed, tmp_path / "b", 2)
    paths = [first_seed, angpt, second_seed, wider, twice, alone, finetuned, also_finetuned]

    loaded, _ = load_checkpoints(list(map(str, paths)), str(data), "cpu")
    arms, notes = group_by_seed(loaded)

    assert notes == []
    members = []
    for arm in arms:
        members.append([paths[index] for index in arm["checkpoints"]])
    assert members == [
        [first_seed, second_seed],
        [angpt],
        [wider],
        [twice],
        [alone],
        [finetuned, also_finetuned],
    ]
    labels = [arm["label"] for arm in arms]
    label_of_seeds, label_of_angpt, *other_labels = labels
    assert len(set(labels)) == 6
    assert label_of_angpt == "anGPT, scale-invariant"
    for label in (label_of_seeds, *other_labels):
        assert label.startswith("GPT+, scale-invariant")
    assert labels[3].endswith("twice.ckpt")


def test_arms_that_were_not_trained_alike_are_noted(run: Path, data: Path, tmp_path: Path) -> None:
    """A table shows their losses side by side. The checkpoints are of the first step."""
    longer = make_run(tmp_path / "longer", data, AnGPT, context_length=2 * LENGTH)
    (run / "metrics.csv").write_text("step,val/tokens,val/loss\n0,1000,3.5\n9,9000,4\n")
    (longer / "metrics.csv").write_text("step,val/tokens,val/loss\n0,900,3.6\n9,9000,4\n")

    loaded, _ = load_checkpoints([str(run), str(longer)], str(data), "cpu")
    (arm, other_arm), notes = group_by_seed(loaded)

    lengths = f"{arm['label']}: {LENGTH}; {other_arm['label']}: {2 * LENGTH}"
    tokens = f"{arm['label']}: 1,000; {other_arm['label']}: 900"
    assert notes == [
        f"The models were trained at different lengths, in tokens: {lengths}.",
        f"The models were trained on different numbers of tokens: {tokens}.",
    ]


def copy_without_seed(run: Path, folder: Path, losses: str = "") -> Path:
    """A copy of a run that has no seed, with validation losses by tokens."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["seed_everything"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "metrics.csv").write_text(f"step,val/tokens,val/loss\n{losses}")
    return folder


def test_of_runs_with_the_same_seed_the_last_counts(run: Path, data: Path, tmp_path: Path) -> None:
    """As in anlit compare. Without a seed, runs with the same losses are copies."""
    again = make_run(tmp_path / "again", data, GPT)
    other_seed = make_run(tmp_path / "other", data, GPT, seed=2)
    seedless = copy_without_seed(run, tmp_path / "seedless", "1,8,3.5\n")
    seedless_copy = copy_without_seed(run, tmp_path / "copy", "1,8,3.5\n")
    not_validated = copy_without_seed(run, tmp_path / "not-validated")
    also_not_validated = copy_without_seed(run, tmp_path / "also-not-validated")
    paths = [run, other_seed, again, seedless, seedless_copy, not_validated, also_not_validated]

    loaded, _ = load_checkpoints(list(map(str, paths)), str(data), "cpu")
    (arm,), notes = group_by_seed(loaded)

    counted = [paths[index] for index in arm["checkpoints"]]
    assert counted == [other_seed, again, seedless_copy, not_validated, also_not_validated]
    assert len(notes) == 2
    for left_out, note in zip([run, seedless], notes, strict=True):
        assert f"{left_out}/checkpoints/best.ckpt is left out, because a later run has" in note

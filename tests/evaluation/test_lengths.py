"""`anlit lengths`: its losses at every length, the arms, and the files of its report."""

import json
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
from anlit.commands.evaluations import main
from anlit.errors import UserError
from anlit.evaluation import lengths as lengths_module
from anlit.evaluation.data import load_validation_data
from anlit.evaluation.lengths import Lengths, estimate_loss, token_losses
from anlit.evaluation.runner import group_by_seed, load_checkpoints
from anlit.evaluation.settings import LengthsSettings
from anlit.nn.kernels.documents import Documents
from anlit.nn.layers.cross_entropy import IGNORE_INDEX
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.modules import quiet_trainer
from tests.data.prepared import VOCABULARY, write_prepared
from tests.evaluation.saved import LENGTH, VAL_TOKENS, make_run, prepare, save, small

N_TOKENS = VAL_TOKENS // 64 * 64
"""Targets in complete pieces of 64."""
DOCUMENT_LENGTH = 24


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
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        if self.document_masking:
            positions = Documents(document_ids, tokens.shape[1], tokens.device).positions
        return self.logits(torch.stack(((tokens + 1) % DOCUMENT_LENGTH, positions), -1))

    def logits(self, h: Tensor) -> Tensor:
        right, position = h.unbind(-1)
        return one_hot(right, VOCABULARY) * torch.log1p(position.double())[..., None]


def exact_loss(position: np.ndarray) -> np.ndarray:
    """The loss of `CountingModel`."""
    return np.log1p((VOCABULARY - 1) / (1 + position))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, TokenShards]:
    """A `CountingModel`, and its documents."""
    tokens = (np.arange(N_TOKENS + 9) % DOCUMENT_LENGTH + 1) % DOCUMENT_LENGTH
    tokens = tokens.astype(np.uint16)
    folder = tmp_path_factory.mktemp("data") / "counting"
    write_prepared(folder, {"train": tokens, "val": tokens})
    model: Any = CountingModel()
    checkpoint = Checkpoint(model, Path("counter.ckpt"), 0, None, None, {})
    return checkpoint, load_validation_data(checkpoint, str(folder))


def measure(
    checkpoint: Checkpoint, data: TokenShards, lengths: list[int], *masking: bool, **settings: int
) -> list[dict[str, Any]]:
    evaluation = Lengths(LengthsSettings(tuple(lengths), masking=masking, **settings))
    evaluation.plan([checkpoint], data)
    return evaluation.measure(checkpoint, data)


def find(results: list[dict[str, Any]], length: int, masked: bool) -> dict[str, Any]:
    """The result at a length and masking."""
    for result in results:
        if result["length"] == length and result["masking"] == masked:
            return result
    raise AssertionError(f"nothing at length {length}")


def test_exact_losses_come_out_by_length_and_position(
    counting: tuple[Checkpoint, TokenShards],
) -> None:
    results = measure(*counting, [16, 64], True, False, batch_tokens=128)

    keys = [(result["masking"], result["length"]) for result in results]
    assert keys == [(True, 16), (True, 64), (False, 16), (False, 64)]
    number = np.arange(N_TOKENS)
    for result in results:
        position = number % result["length"]
        if result["masking"]:
            # Documents begin at the tokens 0, 24, 48, … of the split, and anew with each sequence.
            position = np.minimum(position, number % DOCUMENT_LENGTH)
        mean = exact_loss(position).mean()
        assert result["total"]["tokens"] == N_TOKENS
        assert result["sequences"] == N_TOKENS // result["length"]
        assert result["total"]["loss"] == pytest.approx(mean, rel=1e-6)
        assert result["bits_per_byte"] == pytest.approx(mean / math.log(2) / 3)
        for span in result["by_position"]:
            is_inside = (span["first"] <= position) & (position < span["end"])
            assert span["estimate"]["tokens"] == is_inside.sum()
            if is_inside.any():
                expected = exact_loss(position[is_inside]).mean()
                assert span["estimate"]["loss"] == pytest.approx(expected, rel=1e-6)
    spans = find(results, 64, True)["by_position"]
    assert [span["first"] for span in spans] == [0, 1, 2, 4, 8, 16, 32]
    assert [span["end"] for span in spans] == [1, 2, 4, 8, 16, 32, 64]


def test_the_change_is_the_loss_minus_the_loss_at_the_training_length(
    counting: tuple[Checkpoint, TokenShards],
) -> None:
    results = measure(*counting, [LENGTH, 64], False)

    at_training_length = find(results, LENGTH, False)
    longer = find(results, 64, False)
    difference = longer["total"]["loss"] - at_training_length["total"]["loss"]
    assert longer["change"]["loss"] == pytest.approx(difference, rel=1e-9)
    # Each piece changes by the same.
    assert longer["change"]["standard_error"] == pytest.approx(0.0, abs=1e-9)
    assert at_training_length["change"] is None


def test_the_standard_error_is_over_sequences() -> None:
    losses = np.random.default_rng(0).normal(size=50)

    estimate = estimate_loss(10 * losses, np.full(50, 10.0))

    assert estimate["loss"] == pytest.approx(losses.mean())
    assert estimate["standard_error"] == pytest.approx(losses.std(ddof=1) / math.sqrt(50))
    more_losses = np.append(10 * losses, 0.0)
    more_tokens = np.append(np.full(50, 10.0), 0.0)
    assert estimate_loss(more_losses, more_tokens) == estimate, "a sequence without targets"
    assert estimate_loss(np.zeros(3), np.zeros(3))["loss"] is None
    assert estimate_loss(np.ones(1), np.ones(1))["standard_error"] is None


def test_the_standard_error_of_a_ratio_is_its_spread_over_many_draws() -> None:
    """Sequences have different numbers of targets."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (4000, 60)).astype(float)
    sums = tokens * rng.normal(3, 0.5, tokens.shape) + rng.normal(0, 2, tokens.shape)

    losses = []
    errors = []
    for draw in zip(sums, tokens, strict=True):
        estimate = estimate_loss(*draw)
        losses.append(estimate["loss"])
        errors.append(estimate["standard_error"])

    assert np.mean(errors) == pytest.approx(np.std(losses), rel=0.05)


def test_the_default_lengths_are_multiples_of_the_training_length(run: Path) -> None:
    plan = Lengths(LengthsSettings()).plan(*load_checkpoints([str(run)], None))

    assert plan == {"lengths": [16, 64, 256], "tokens": VAL_TOKENS // 256 * 256}


def test_the_loss_at_the_training_length_is_equal_to_validation(run: Path) -> None:
    checkpoint = load_checkpoint(str(run), "cpu")
    data = load_validation_data(checkpoint)
    data.val_tokens = N_TOKENS
    data.val_batch_size = 4
    (metrics,) = quiet_trainer(devices=1).validate(checkpoint.model, data, verbose=False)

    reloaded = load_checkpoint(str(run), "cpu")
    (result,) = measure(reloaded, load_validation_data(reloaded), [LENGTH], True)

    assert result["total"]["loss"] == pytest.approx(metrics["val/loss"], rel=1e-6)


def test_a_piece_does_not_reach_from_a_folder_into_the_next(data: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mixed", data, GPT)
    checkpoint = load_checkpoint(str(run), "cpu")
    assert checkpoint.config is not None
    first = prepare(tmp_path / "a", n_val=101)
    second = prepare(tmp_path / "b", n_val=301)
    arguments = {"paths": {"a": str(first), "b": str(second)}}
    checkpoint.config["data"] = {"class_path": "anlit.Mixture", "init_args": arguments}
    mixture = load_validation_data(checkpoint)

    short, long = measure(checkpoint, mixture, [16, 64], True)

    assert short["total"]["tokens"] == long["total"]["tokens"] == 384
    assert (short["sequences"], long["sequences"]) == (7 + 18, 2 + 5)
    difference = long["total"]["loss"] - short["total"]["loss"]
    assert long["change"]["loss"] == pytest.approx(difference, rel=1e-9)


def test_losses_do_not_depend_on_the_rows_that_logits_are_made_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_checkpoint(str(run), "cpu")
    data = load_validation_data(checkpoint)
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


def copy_with_initial_weights(run: Path, folder: Path) -> Path:
    """A copy of a run that says it was fine-tuned from weights of its own."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["initial_weights"] = f"runs/{folder.name}.ckpt"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_runs_that_differ_in_the_seed_are_an_arm(run: Path, data: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run, tmp_path / "gpt-1"))
    checkpoints = run / "checkpoints"
    twice = Path(shutil.copy(checkpoints / "best.ckpt", checkpoints / "twice.ckpt"))
    lone_model = small(GPT, vocab_size=VOCABULARY)
    paths = [
        run,
        make_run(tmp_path / "angpt", data, AnGPT),
        make_run(tmp_path / "gpt-2", data, GPT, seed=2),
        make_run(tmp_path / "wider", data, GPT, d_model=16),
        twice,
        save(lone_model, tmp_path / "alone.ckpt"),
        copy_with_initial_weights(run, tmp_path / "a"),
        copy_with_initial_weights(run, tmp_path / "b"),
    ]

    loaded, _ = load_checkpoints(list(map(str, paths)), str(data))
    arms = group_by_seed(loaded)

    assert [arm["checkpoints"] for arm in arms] == [[0, 2], [1], [3], [4], [5], [6, 7]]
    labels = [arm["label"] for arm in arms]
    assert len(set(labels)) == len(labels)
    assert labels[1] == "anGPT, scale-invariant"
    for label in (labels[0], *labels[2:]):
        assert label.startswith("GPT+, scale-invariant")
    assert labels[3].endswith("twice.ckpt")


def run_lengths(output: Path, *arguments: object) -> dict[str, Any]:
    """Run the command; returns the content of lengths.json."""
    main(["lengths", *map(str, arguments), f"--output={output}"])
    return json.loads((output / "lengths.json").read_text())


@pytest.fixture(scope="module")
def report(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on two seeds of GPT+ and an anGPT."""
    folder = tmp_path_factory.mktemp("report")
    second = make_run(folder / "gpt-2", data, GPT, seed=2)
    angpt = make_run(folder / "angpt", data, AnGPT)
    output = folder / "new" / "out"
    run_lengths(output, run, second, angpt, "--lengths=64,16", "--tokens=1000")
    return output


def test_the_command_writes_table_numbers_and_figure(report: Path) -> None:
    record = json.loads((report / "lengths.json").read_text())
    markdown = (report / "lengths.md").read_text()

    assert sorted(file.name for file in report.iterdir()) == [
        "lengths.html",
        "lengths.json",
        "lengths.md",
        "lengths.pdf",
        "lengths.png",
        "lengths.svg",
    ]
    assert record["command"].startswith("anlit lengths ")
    assert {"git", "versions", "hardware", "device", "data"} <= record.keys()
    assert record["settings"]["tokens"] == 960
    assert [checkpoint["seed"] for checkpoint in record["checkpoints"]] == [1, 2, 1]
    pair, single = record["arms"]
    assert pair["checkpoints"] == [0, 1]
    assert single["checkpoints"] == [2]
    totals = []
    for results in record["measurements"][:2]:
        totals.append(find(results, 64, False)["total"]["loss"])
    loss = find(pair["loss"], 64, False)
    assert loss["mean"] == pytest.approx(np.mean(totals))
    assert loss["sd"] == pytest.approx(np.std(totals, ddof=1))
    printed_loss = f"{loss['mean']:.4f} ± {loss['sd']:.4f}"
    assert f"| no | 64 | 2 | {printed_loss} |" in markdown
    assert "| 32 – 63 | 480 |" in markdown
    assert "Evaluated on 960 tokens and not 1,000" in markdown


def test_a_record_gives_the_same_report_again(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["lengths", str(report / "lengths.json"), f"--output={tmp_path}"])

    names = {file.name for file in tmp_path.iterdir()}
    assert names == {file.name for file in report.iterdir()} - {"lengths.json"}
    for name in names:
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes(), name
    loss = json.loads((report / "lengths.json").read_text())["arms"][0]["loss"][0]
    assert f"{loss['mean']:.4f} ± {loss['sd']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["[", '{"settings": 1}'])
def test_another_json_file_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)

    with pytest.raises(UserError, match=r"other\.json .*: give (the|its) lengths\.json"):
        main(["lengths", str(file), f"--output={tmp_path}"])


@pytest.mark.usefixtures("no_figures")
def test_a_loss_that_is_not_finite_is_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_run = Path(shutil.copytree(run, tmp_path / "broken"))
    file = broken_run / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.head.weight"][:] = 3e38  # finite, but not the logits
    torch.save(content, file)

    record = run_lengths(tmp_path, file, "--lengths=16")

    assert record["arms"][0]["loss"][0]["mean"] is None
    assert "not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--lengths=47,48"],
            f"/val has {VAL_TOKENS - 1:,} tokens to predict and this needs 2,256, the least common",
        ),
        (
            ["--lengths=16,64", "--tokens=50"],
            "--tokens is 50 and must be at least 64, the least common multiple of",
        ),
    ],
)
def test_wrong_settings_are_a_single_sentence(
    arguments: list[str], message: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run_lengths(tmp_path, run, *arguments)


def test_checkpoints_of_different_data_need_common_data(run: Path, tmp_path: Path) -> None:
    other_data = prepare(tmp_path / "other", seed=9)
    second = make_run(tmp_path / "gpt-2", other_data, GPT)

    with pytest.raises(UserError, match=r"have different data .* set --data"):
        run_lengths(tmp_path, run, second, "--lengths=16")

    _, data = load_checkpoints([str(run), str(second)], str(other_data))
    assert data.path == str(other_data)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("family", [None, "llama"])
def test_a_note_on_masking_in_training_is_only_on_models_trained_here(
    family: str | None, data: Path, tmp_path: Path
) -> None:
    """The setting of an imported model tells nothing about its training."""
    model = small(GPT, vocab_size=VOCABULARY, context_length=LENGTH)
    file = save(model, tmp_path / "a.ckpt", family=family, data=None)

    record = run_lengths(tmp_path / "out", file, "--data", data)

    notes = " ".join(record["notes"])
    assert ("trained with document masking" in notes) == (family is None)

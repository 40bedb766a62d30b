"""`anlit lengths`: known losses come out, the same tokens are scored at every length, seeds are grouped; its files."""

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
from anlit.evaluation import lengths as module
from anlit.evaluation.data import load_validation_data
from anlit.evaluation.lengths import Lengths, estimate_loss, token_losses
from anlit.evaluation.runner import group_by_seed, load_checkpoints
from anlit.evaluation.settings import LengthsSettings
from anlit.nn.kernels.documents import Documents
from anlit.training.load_model import Checkpoint, load_checkpoint
from tests.data.modules import quiet_trainer
from tests.data.prepared import VOCABULARY, write_prepared
from tests.evaluation.saved import LENGTH, VAL_TOKENS, make_run, prepare, save, small

N = VAL_TOKENS // 64 * 64
DOCUMENT = 24


class CountingModel(nn.Module):
    """Knows the next token of documents that count 1, 2, … and end with 0, the surer the further it has read.

    The logit of the right token is ln(1 + p) above the others', p the position that attention would know: the loss is
    ln(1 + (V − 1)/(1 + p)).
    """

    vocab_size, context_length, document_masking = VOCABULARY, LENGTH, True

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
        return self.logits(torch.stack(((tokens + 1) % DOCUMENT, positions), -1))

    def logits(self, h: Tensor) -> Tensor:
        right, position = h.unbind(-1)
        return one_hot(right, VOCABULARY) * torch.log1p(position.double())[..., None]


def known_loss(position: np.ndarray) -> np.ndarray:
    return np.log1p((VOCABULARY - 1) / (1 + position))


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, TokenShards]:
    tokens, folder = (
        (np.arange(N + 9) % DOCUMENT + 1) % DOCUMENT,
        tmp_path_factory.mktemp("data") / "counting",
    )
    write_prepared(folder, {name: tokens.astype(np.uint16) for name in ("train", "val")})
    model: Any = CountingModel()
    checkpoint = Checkpoint(model, Path("counter.ckpt"), 0, None, None, {})
    return checkpoint, load_validation_data(checkpoint, str(folder))


def measure(
    checkpoint: Checkpoint, data: TokenShards, lengths: list[int], *masking: bool, **settings: int
) -> list:
    evaluation = Lengths(LengthsSettings(tuple(lengths), masking=masking, **settings))
    evaluation.plan([checkpoint], data)
    return evaluation.measure(checkpoint, data)


def at(losses: list[dict[str, Any]], length: int, masking: bool) -> dict[str, Any]:
    return next(own for own in losses if (own["length"], own["masking"]) == (length, masking))


def test_known_losses_come_out_by_length_and_position(
    counting: tuple[Checkpoint, TokenShards],
) -> None:
    losses = measure(*counting, [16, 64], True, False, batch_tokens=128)
    assert [(own["masking"], own["length"]) for own in losses] == [
        (True, 16),
        (True, 64),
        (False, 16),
        (False, 64),
    ]
    for own in losses:
        in_sequence = np.arange(N) % own["length"]
        # Documents begin at the tokens 0, 24, 48, … of the split, and anew with each sequence.
        known = np.minimum(np.arange(N) % DOCUMENT, in_sequence) if own["masking"] else in_sequence
        assert (own["total"]["tokens"], own["sequences"]) == (N, N // own["length"])
        assert own["total"]["loss"] == pytest.approx(known_loss(known).mean(), rel=1e-6)
        assert own["bits_per_byte"] == pytest.approx(known_loss(known).mean() / math.log(2) / 3)
        for part in own["by_position"]:
            inside = (part["first"] <= known) & (known < part["end"])
            assert part["estimate"]["tokens"] == inside.sum()
            if inside.any():
                assert part["estimate"]["loss"] == pytest.approx(
                    known_loss(known[inside]).mean(), rel=1e-6
                )
    bounds = [(part["first"], part["end"]) for part in at(losses, 64, True)["by_position"]]
    assert bounds == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    trained, change = at(losses, LENGTH, False), at(losses, 64, False)["change"]
    known = (
        at(losses, 64, False)["total"]["loss"] - trained["total"]["loss"],
        0.0,
    )  # each block changes by the same
    assert (change["loss"], change["standard_error"]) == pytest.approx(known, rel=1e-9, abs=1e-9)
    assert trained["change"] is None


def test_a_run_on_needles_is_measured_on_its_text(tmp_path: Path, data: Path) -> None:
    run_dir = make_run(tmp_path / "run", data, GPT)
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["data"] = {
        "class_path": "anlit.NeedleInHaystack",
        "init_args": {"path": str(data), "lengths": [16]},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    assert type(load_validation_data(load_checkpoint(str(run_dir), "cpu"))) is TokenShards


def test_standard_error_is_that_of_the_mean_over_sequences() -> None:
    losses = np.random.default_rng(0).normal(size=50)
    known = estimate_loss(10 * losses, np.full(50, 10.0))
    assert known["loss"] == pytest.approx(losses.mean())
    assert known["standard_error"] == pytest.approx(losses.std(ddof=1) / math.sqrt(50))
    # A ratio of two sums: against the spread over many draws of sequences with different counts.
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (4000, 60)).astype(float)
    sums = tokens * rng.normal(3, 0.5, tokens.shape) + rng.normal(0, 2, tokens.shape)
    estimates = [estimate_loss(*draw) for draw in zip(sums, tokens, strict=True)]
    spread = np.std([draw["loss"] for draw in estimates])
    assert np.mean([draw["standard_error"] for draw in estimates]) == pytest.approx(
        spread, rel=0.05
    )
    assert estimate_loss(np.append(10 * losses, 0.0), np.append(np.full(50, 10.0), 0.0)) == known
    assert estimate_loss(np.zeros(3), np.zeros(3))["loss"] is None
    assert estimate_loss(np.ones(1), np.ones(1))["standard_error"] is None


def test_loss_at_the_training_length_is_that_of_validation(run: Path) -> None:
    """The default lengths are 1, 4 and 16 times that length."""
    plan = Lengths(LengthsSettings()).plan(*load_checkpoints([str(run)], None))
    assert plan == {"lengths": [16, 64, 256], "tokens": VAL_TOKENS // 256 * 256}
    checkpoint = load_checkpoint(str(run), "cpu")
    validated = load_validation_data(checkpoint)
    validated.val_tokens, validated.val_batch_size = N, 4
    logged = quiet_trainer(devices=1).validate(checkpoint.model, validated, verbose=False)[0]
    (own,) = measure(
        load_checkpoint(str(run), "cpu"), load_validation_data(checkpoint), [LENGTH], True
    )
    assert own["total"]["loss"] == pytest.approx(logged["val/loss"], rel=1e-6)


def test_folders_whose_remainders_end_in_between(data: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(make_run(tmp_path / "mixed", data, GPT)), "cpu")
    assert checkpoint.config is not None
    paths = {
        "a": str(prepare(tmp_path / "a", n_val=101)),
        "b": str(prepare(tmp_path / "b", n_val=301)),
    }
    checkpoint.config["data"] = {"class_path": "anlit.Mixture", "init_args": {"paths": paths}}
    short, long = measure(checkpoint, load_validation_data(checkpoint), [16, 64], True)
    assert short["total"]["tokens"] == long["total"]["tokens"] == 384
    assert (short["sequences"], long["sequences"]) == (7 + 18, 2 + 5)
    assert long["change"]["loss"] == pytest.approx(
        long["total"]["loss"] - short["total"]["loss"], rel=1e-9
    )


def test_a_run_can_name_neither_an_address_nor_data_without_a_path(run: Path) -> None:
    """It may be someone else's, and the user's credentials are not for it."""
    checkpoint = load_checkpoint(str(run), "cpu")
    assert checkpoint.config is not None
    for settings, sentence in (
        ({"path": "s3://theirs/data"}, "names the address "),
        ({}, "is not complete "),
    ):
        checkpoint.config["data"]["init_args"] = settings
        with pytest.raises(UserError, match=f"{sentence}.*: set --data"):
            load_validation_data(checkpoint)


def test_losses_do_not_depend_on_the_pieces_that_logits_are_made_in(run: Path, monkeypatch) -> None:
    checkpoint = load_checkpoint(str(run), "cpu")
    data = load_validation_data(checkpoint)
    data.score_first_token = False
    data.setup("validate")
    batch = next(iter(data.val_dataloader()))
    logits = checkpoint.model(batch.tokens, batch.document_ids)
    expected = cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    assert (batch.targets == -100).any()
    for at_once in (1 << 26, 7 * VOCABULARY, 1):
        monkeypatch.setattr(module, "MAX_LOGITS_AT_ONCE", at_once)
        torch.testing.assert_close(
            token_losses(checkpoint.model, batch), expected, rtol=1e-5, atol=1e-5
        )
    assert torch.equal(
        checkpoint.model(batch.tokens, batch.document_ids), logits
    )  # the head is back


def test_runs_that_differ_in_the_seed_are_one_arm(run: Path, data: Path, tmp_path: Path) -> None:
    second = make_run(tmp_path / "gpt-2", data, GPT, seed=2)
    other = make_run(tmp_path / "angpt", data, AnGPT)
    wider = make_run(tmp_path / "wider", data, GPT, d_model=16)
    alone = save(small(GPT, vocab_size=VOCABULARY), tmp_path / "alone.ckpt")
    run = Path(shutil.copytree(run, tmp_path / "gpt-1"))
    twice = Path(shutil.copy(run / "checkpoints" / "best.ckpt", run / "checkpoints" / "twice.ckpt"))
    paths = [run, other, second, wider, twice, alone]
    for place in "ab":  # each seed fine-tuned from weights of its own
        paths.append(Path(shutil.copytree(run, tmp_path / place)))
        config = yaml.safe_load((run / "config.yaml").read_text()) | {
            "initial_weights": f"runs/{place}.ckpt"
        }
        (paths[-1] / "config.yaml").write_text(yaml.safe_dump(config))
    arms = group_by_seed(load_checkpoints([str(path) for path in paths], str(data))[0])
    assert [arm["checkpoints"] for arm in arms] == [[0, 2], [1], [3], [4], [5], [6, 7]]
    first, other_label, *more = labels = [arm["label"] for arm in arms]
    assert len(set(labels)) == len(labels)
    assert other_label == "anGPT, scale-invariant"
    assert all(label.startswith("GPT+, scale-invariant") for label in (first, *more))
    assert labels[3].endswith("twice.ckpt")


def command(output: Path, *arguments: object) -> dict[str, Any]:
    """The content of lengths.json."""
    main(["lengths", *map(str, arguments), f"--output={output}"])
    return json.loads((output / "lengths.json").read_text())


@pytest.fixture(scope="module")
def report(run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report on two seeds of GPT+ and one anGPT."""
    folder = tmp_path_factory.mktemp("report")
    runs = (
        run,
        make_run(folder / "gpt-2", data, GPT, seed=2),
        make_run(folder / "angpt", data, AnGPT),
    )
    command(folder / "made" / "out", *runs, "--lengths=64,16", "--tokens=1000")
    return folder / "made" / "out"


def test_command_writes_table_numbers_and_picture(report: Path) -> None:
    kinds = ("json", "md", "html", "png", "pdf", "svg")
    assert {file.name for file in report.iterdir()} == {f"lengths.{kind}" for kind in kinds}
    record = json.loads((report / "lengths.json").read_text())
    assert record["command"].startswith("anlit lengths ")
    assert {"git", "versions", "hardware", "device", "data"} <= record.keys()
    assert record["settings"]["tokens"] == 960
    assert [own["seed"] for own in record["checkpoints"]] == [1, 2, 1]
    assert [arm["checkpoints"] for arm in record["arms"]] == [[0, 1], [2]]
    totals = [at(own, 64, False)["total"]["loss"] for own in record["measurements"][:2]]
    loss = at(record["arms"][0]["loss"], 64, False)
    assert (loss["mean"], loss["sd"]) == pytest.approx((np.mean(totals), np.std(totals, ddof=1)))
    markdown = (report / "lengths.md").read_text()
    (row,) = (
        line
        for line in markdown.splitlines()
        if line.startswith("| GPT+") and "| no | 64 |" in line
    )
    assert row.split(" | ")[4] == f"{loss['mean']:.4f} ± {loss['sd']:.4f}"
    assert "| 32 – 63 | 480 |" in markdown
    assert "Evaluated on 960 tokens and not 1,000" in markdown


def test_a_record_gives_the_same_report_again_and_nothing_else_does(
    report: Path, tmp_path: Path, capsys
) -> None:
    main(["lengths", str(report / "lengths.json"), f"--output={tmp_path}"])
    again = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert again == {
        file.name: file.read_bytes() for file in report.iterdir() if file.suffix != ".json"
    }
    loss = json.loads((report / "lengths.json").read_text())["arms"][0]["loss"][0]
    assert f"{loss['mean']:.4f} ± {loss['sd']:.4f}" in capsys.readouterr().out
    for content in ("[", '{"settings": 1}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(UserError, match=r"other\.json .*: give (the|its) lengths\.json"):
            main(["lengths", str(tmp_path / "other.json"), f"--output={tmp_path}"])


def test_a_loss_that_is_not_finite_is_told(run: Path, tmp_path: Path, capsys) -> None:
    file = Path(shutil.copytree(run, tmp_path / "broken"), "checkpoints", "best.ckpt")
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.head.weight"][:] = 3e38  # finite; the logits are not
    torch.save(content, file)
    assert command(tmp_path, file, "--lengths=16")["arms"][0]["loss"][0]["mean"] is None
    assert "not finite" in capsys.readouterr().out


def test_wrong_settings_and_checkpoints_of_different_data_are_one_sentence(
    run: Path, tmp_path: Path
) -> None:
    other = prepare(tmp_path / "other", seed=9)
    second = make_run(tmp_path / "gpt-2", other, GPT)
    for arguments, sentence in (
        (
            ["--lengths=47,48"],
            f"/val has {VAL_TOKENS - 1:,} tokens to predict and this needs 2,256, the least common",
        ),
        (
            ["--lengths=16,64", "--tokens=50"],
            "--tokens is 50 and must be at least 64, the least common multiple of",
        ),
        ([second, "--lengths=16"], "have different data .* set --data"),
    ):
        with pytest.raises(UserError, match=sentence):
            command(tmp_path, run, *arguments)
    assert load_checkpoints([str(run), str(second)], str(other))[1].path == str(other)


@pytest.mark.parametrize("family", [None, "llama"])
def test_only_of_models_that_were_trained_here_it_says_how_documents_were_masked(
    family: str | None, data: Path, tmp_path: Path
) -> None:
    """An imported model's setting tells nothing of its training."""
    model = small(GPT, vocab_size=VOCABULARY, context_length=LENGTH)
    file = save(model, tmp_path / "a.ckpt", family=family, data=None)
    main(["lengths", str(file), "--data", str(data), "--output", str(tmp_path / "out")])
    notes = json.loads((tmp_path / "out" / "lengths.json").read_text())["notes"]
    said = [note for note in notes if "trained with document masking" in note]
    assert len(said) == (1 if family is None else 0)

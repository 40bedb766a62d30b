"""Samples at each validation, and kept checkpoints, from the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from anlit.checkpoints.checkpoint_io import read_checkpoint
from anlit.cli import main
from tests.data.reader import edit
from tests.evaluation.test_generate_command import generate_records
from tests.integration.conftest import (
    KILLED,
    Train,
    assert_same_curves,
    assert_same_training_state,
    callback,
    fit_arguments,
    last_checkpoint,
    run,
)
from tests.integration.ranks import DDP, FSDP
from tests.integration.run_files import logged

DROPOUT = "--model.dropout=0.1"
SAMPLES = [
    "--trainer.callbacks+=anlit.Samples",
    "--trainer.callbacks.prompts=['def main(', 'import os']",
    "--trainer.callbacks.max_tokens=12",
    "--trainer.callbacks.top_p=0.9",
    "--trainer.callbacks.seed=5",
]
KEEP = ["--config=trainer/keep.yaml", "--trainer.callbacks.steps=10"]
TWO_RANKS = ["--trainer.max_steps=20", DROPOUT]
GENERATE = ["def main(", "import os", "--max_tokens=12", "--top_p=0.9", "--seed=5", "--device=cpu"]


def samples(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def sampled(trained: Train) -> Path:
    """A run of 40 steps with samples and kept checkpoints, validated after 17, 34 and 40."""
    return trained(*KEEP, *SAMPLES, DROPOUT, "--trainer.num_sanity_val_steps=1")


def test_prompts_are_continued_at_each_validation_as_by_anlit_generate(
    sampled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = samples(sampled)

    validations = [(int(step), float(value)) for step, value in logged(sampled, "val/tokens")]
    points = [(record["step"], record["tokens"]) for record in records]
    assert points == [point for point in validations for _ in range(2)]
    assert [step for step, _ in validations] == [16, 33, 39]
    assert [record["prompt"] for record in records] == ["def main(", "import os"] * 3
    expected = generate_records(capsys, sampled / "checkpoints" / "last.ckpt", *GENERATE)
    assert [record["text"] for record in records[-2:]] == [record["text"] for record in expected]
    assert len({record["text"] for record in records}) == 6, "the model changes"


def test_tensorboard_shows_the_text(sampled: Path) -> None:
    events = EventAccumulator(str(sampled)).Reload()

    shown = events.Tensors("samples/1/text_summary")
    records = samples(sampled)[1::2]
    assert [event.step for event in shown] == [16, 33, 39]
    for event, record in zip(shown, records, strict=True):
        (text,) = event.tensor_proto.string_val
        for line in [record["prompt"], *record["text"].split("\n")]:
            assert f"    {line}" in text.decode().split("\n")


def test_training_is_the_same_to_the_bit(sampled: Path, trained: Train) -> None:
    without = trained(DROPOUT)

    assert_same_training_state(last_checkpoint(without), last_checkpoint(sampled))
    assert_same_curves(without, sampled)


def test_a_checkpoint_of_every_tenth_step_is_kept(sampled: Path) -> None:
    steps = {}
    for file in (sampled / "checkpoints").glob("*.ckpt"):
        steps[file.name] = read_checkpoint(file)["global_step"]

    kept = {f"step-{step:08}.ckpt": step for step in (10, 20, 30, 40)}
    assert steps == {**kept, "last.ckpt": 40, "best.ckpt": 40}


def test_a_killed_and_continued_run_has_each_step_once(
    shards: Path, tmp_path: Path, sampled: Path
) -> None:
    """It is killed between the samples of a validation and its checkpoint."""
    arguments = fit_arguments(shards, tmp_path / "run", *KEEP, *SAMPLES, DROPOUT)
    save = "anlit.training.callbacks.checkpoints:LastCheckpoint"
    kill = callback("integration.callbacks.KilledIn", owner=save, name="on_validation_end", call=2)
    assert run([*arguments, *kill]) == KILLED
    assert [record["step"] for record in samples(tmp_path / "run")] == [16, 16, 33, 33]
    assert last_checkpoint(tmp_path / "run")["global_step"] == 32
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 3')

    assert run([*arguments, "--ckpt_path=last"]) == 0

    assert samples(tmp_path / "run") == samples(sampled)
    assert_same_training_state(last_checkpoint(sampled), last_checkpoint(tmp_path / "run"))
    names = [
        {file.name for file in (path / "checkpoints").iterdir()}
        for path in (sampled, tmp_path / "run")
    ]
    assert names[0] == names[1]


def test_a_kept_checkpoint_continues_the_run(tmp_path: Path, sampled: Path) -> None:
    shutil.copytree(sampled, tmp_path / "run")
    config = f"--config={tmp_path}/run/config.yaml"
    kept = tmp_path / "run" / "checkpoints" / "step-00000020.ckpt"

    assert run(["fit", config, f"--run_dir={tmp_path}/run", f"--ckpt_path={kept}"]) == 0

    assert samples(tmp_path / "run") == samples(sampled)
    assert_same_training_state(last_checkpoint(sampled), last_checkpoint(tmp_path / "run"))


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_ranks_write_the_same_samples_once(
    strategy: list[str], trained: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(*strategy, *SAMPLES, *TWO_RANKS, n_ranks=2)

    records = samples(folder)
    assert [record["step"] for record in records] == [16, 16, 19, 19]
    expected = generate_records(capsys, folder / "checkpoints" / "last.ckpt", *GENERATE)
    assert [record["text"] for record in records[-2:]] == [record["text"] for record in expected]


@pytest.mark.parametrize(
    "strategy", [pytest.param(DDP, marks=pytest.mark.slow), FSDP], ids=["ddp", "fsdp"]
)
def test_training_on_two_ranks_is_the_same_to_the_bit(strategy: list[str], trained: Train) -> None:
    folder = trained(*strategy, *SAMPLES, *TWO_RANKS, n_ranks=2)
    without = trained(*strategy, *TWO_RANKS, n_ranks=2)

    assert_same_training_state(last_checkpoint(without), last_checkpoint(folder))
    assert_same_curves(without, folder)


@pytest.mark.parametrize("averages_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_samples_are_of_the_weights_that_are_validated(
    averages_first: bool, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of weights is validated and in last.ckpt, in whatever order the callbacks are."""
    averaging = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.9"]
    flags = [*averaging, *SAMPLES] if averages_first else [*SAMPLES, *averaging]
    arguments = fit_arguments(
        shards, tmp_path / "run", *flags, "--trainer.max_steps=6", model="GPT"
    )

    assert run(arguments) == 0

    texts = [record["text"] for record in samples(tmp_path / "run")]
    expected = generate_records(capsys, tmp_path / "run" / "checkpoints" / "last.ckpt", *GENERATE)
    assert texts == [record["text"] for record in expected]


def test_by_default_documents_of_the_validation_split_begin(shards: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(
        shards,
        tmp_path / "run",
        "--config=trainer/samples.yaml",
        "--trainer.max_steps=1",
        "--trainer.precision=bf16-mixed",
    )

    assert run(arguments) == 0

    records = samples(tmp_path / "run")
    assert len(records) > 1
    source = json.loads((shards / "manifest.json").read_text())["settings"]["source"]
    texts = [path.read_text() for path in Path(source).glob("*.py")]
    for record in records:
        assert any(text.startswith(record["prompt"]) for text in texts)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("prompts=once upon a time", "Samples has prompts=once upon a time, which is no file"),
        ("prompts=[]", "Samples has no prompt: give one"),
        ("max_tokens=0", "Samples has max_tokens=0: it must be at least 1"),
        ("top_p=0", "top_p 0 must be a probability in (0, 1]"),
        ("top_k=0", "top_k 0 must be 1 or more"),
        ("tokenizer=nowhere", "there is no tokenizer at nowhere"),
    ],
)
def test_mistakes_are_a_single_sentence(
    shards: Path, tmp_path: Path, refusal, setting: str, sentence: str
) -> None:
    flags = ["--config=trainer/samples.yaml", f"--trainer.callbacks.{setting}"]

    assert sentence in refusal(*fit_arguments(shards, tmp_path / "run", *flags))


def test_a_corpus_of_tokens_alone_is_refused(shards: Path, tmp_path: Path, refusal) -> None:
    data = shutil.copytree(shards, tmp_path / "tokens")
    tokenizer = shutil.move(data / "tokenizer.json", tmp_path / "tokenizer.json")
    edit(data / "manifest.json", lambda manifest: manifest.update(tokenizer_sha256=None))
    arguments = fit_arguments(data, tmp_path / "run", *SAMPLES, "--trainer.max_steps=1")

    message = refusal(*arguments)

    assert f"no tokenizer at {data}/tokenizer.json: set the tokenizer of Samples" in message
    assert not (tmp_path / "run").exists()
    assert main([*arguments, f"--trainer.callbacks.tokenizer={tokenizer}"]) == 0
    assert len(samples(tmp_path / "run")) == 2

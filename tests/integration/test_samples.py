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
from tests.integration.cases import slow_cases
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
from tests.integration.run_files import column, file_names, samples_of, steps, values

DROPOUT = "--model.dropout=0.1"
SAMPLES = [
    "--trainer.callbacks+=anlit.Samples",
    "--trainer.callbacks.prompts=['def main(', 'import os']",
    "--trainer.callbacks.max_tokens=12",
    "--trainer.callbacks.top_p=0.9",
    "--trainer.callbacks.seed=5",
]
KEEP = ["--config=trainer/keep.yaml", "--trainer.callbacks.steps=10"]
TWO_RANKS = ["--trainer.max_steps=8", "--trainer.val_check_interval=5", DROPOUT]
GENERATE = ["def main(", "import os", "--max_tokens=12", "--top_p=0.9", "--seed=5", "--device=cpu"]


def texts_of(records: list[dict[str, Any]]) -> list[str]:
    return values(records, "text")


@pytest.fixture(scope="module")
def sampled(trained: Train) -> Path:
    """A run of 40 steps with samples and kept checkpoints, validated after 17, 34 and 40."""
    return trained(*KEEP, *SAMPLES, DROPOUT, "--trainer.num_sanity_val_steps=1")


def test_prompts_are_continued_at_each_validation_as_by_anlit_generate(
    sampled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = samples_of(sampled)
    expected = generate_records(capsys, sampled / "checkpoints" / "last.ckpt", *GENERATE)

    assert texts_of(records[-2:]) == texts_of(expected)
    assert len(set(texts_of(records))) == 6, "the model changes"
    assert steps(sampled, "val/tokens") == [16, 33, 39]
    of_first_prompt = records[::2]
    of_second_prompt = records[1::2]
    assert set(values(of_first_prompt, "prompt")) == {"def main("}
    assert set(values(of_second_prompt, "prompt")) == {"import os"}
    for of_prompt in (of_first_prompt, of_second_prompt):
        assert values(of_prompt, "step") == [16, 33, 39]
        assert values(of_prompt, "tokens") == column(sampled, "val/tokens")


def test_a_run_may_have_two_kinds_of_samples(trained: Train) -> None:
    likeliest = [
        "--trainer.callbacks+=anlit.Samples",
        "--trainer.callbacks.prompts=['import os']",
        "--trainer.callbacks.max_tokens=3",
        "--trainer.callbacks.temperature=0",
    ]
    run_dir = trained(*SAMPLES, *likeliest, "--trainer.max_steps=2")

    assert values(samples_of(run_dir), "prompt") == ["def main(", "import os", "import os"]


def test_tensorboard_shows_the_text(sampled: Path) -> None:
    events = EventAccumulator(str(sampled)).Reload()

    shown = events.Tensors("samples/1/text_summary")
    records = samples_of(sampled)[1::2]
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
    step_by_name = {}
    for file in (sampled / "checkpoints").glob("*.ckpt"):
        step_by_name[file.name] = read_checkpoint(file)["global_step"]

    assert step_by_name == {
        "step-00000010.ckpt": 10,
        "step-00000020.ckpt": 20,
        "step-00000030.ckpt": 30,
        "step-00000040.ckpt": 40,
        "last.ckpt": 40,
        "best.ckpt": 40,
    }


def test_a_killed_and_continued_run_has_each_step_once(
    shards: Path, tmp_path: Path, sampled: Path
) -> None:
    """It is killed between the samples of a validation and its checkpoint."""
    cut = tmp_path / "run"
    arguments = fit_arguments(shards, cut, *KEEP, *SAMPLES, DROPOUT)
    save = "anlit.training.callbacks.checkpoints:LastCheckpoint"
    kill = callback("integration.callbacks.KilledIn", owner=save, name="on_validation_end", call=2)
    assert run([*arguments, *kill]) == KILLED
    assert values(samples_of(cut), "step") == [16, 16, 33, 33]
    assert last_checkpoint(cut)["global_step"] == 32
    with (cut / "samples.jsonl").open("a") as file:
        file.write('{"step": 3')

    assert run([*arguments, "--ckpt_path=last"]) == 0

    assert samples_of(cut) == samples_of(sampled)
    assert_same_training_state(last_checkpoint(sampled), last_checkpoint(cut))
    assert_same_curves(sampled, cut)
    assert file_names(cut / "checkpoints") == file_names(sampled / "checkpoints")


def test_a_kept_checkpoint_continues_the_run(tmp_path: Path, sampled: Path) -> None:
    run_dir = shutil.copytree(sampled, tmp_path / "run")
    config = f"--config={run_dir}/config.yaml"
    checkpoint = run_dir / "checkpoints" / "step-00000030.ckpt"

    assert main(["fit", config, f"--run_dir={run_dir}", f"--ckpt_path={checkpoint}"]) == 0

    assert samples_of(run_dir) == samples_of(sampled)
    assert_same_training_state(last_checkpoint(sampled), last_checkpoint(run_dir))


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_ranks_write_the_same_samples_once(
    strategy: list[str], trained: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(*strategy, *SAMPLES, *TWO_RANKS, n_ranks=2)

    records = samples_of(folder)
    expected = generate_records(capsys, folder / "checkpoints" / "last.ckpt", *GENERATE)
    assert values(records, "step") == [4, 4, 7, 7]
    assert texts_of(records[-2:]) == texts_of(expected)


@pytest.mark.parametrize("strategy", [*slow_cases([DDP]), FSDP], ids=["ddp", "fsdp"])
def test_training_on_two_ranks_is_the_same_to_the_bit(strategy: list[str], trained: Train) -> None:
    folder = trained(*strategy, *SAMPLES, *TWO_RANKS, n_ranks=2)
    without = trained(*strategy, *TWO_RANKS, n_ranks=2)

    assert_same_training_state(last_checkpoint(without), last_checkpoint(folder))
    assert_same_curves(without, folder)


@pytest.mark.parametrize("averages_first", [True, *slow_cases([False])])
def test_samples_are_of_the_weights_that_are_validated(
    averages_first: bool, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of weights is validated and in last.ckpt, in whatever order the callbacks are."""
    averaging = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.9"]
    flags = [*averaging, *SAMPLES] if averages_first else [*SAMPLES, *averaging]
    run_dir = tmp_path / "run"

    assert main(fit_arguments(shards, run_dir, *flags, "--trainer.max_steps=6", model="GPT")) == 0

    expected = generate_records(capsys, run_dir / "checkpoints" / "last.ckpt", *GENERATE)
    assert texts_of(samples_of(run_dir)) == texts_of(expected)


def test_by_default_documents_of_the_validation_split_begin(shards: Path, tmp_path: Path) -> None:
    arguments = fit_arguments(
        shards,
        tmp_path / "run",
        "--config=trainer/samples.yaml",
        "--trainer.max_steps=1",
        "--trainer.precision=bf16-mixed",
    )

    assert main(arguments) == 0

    prompts = values(samples_of(tmp_path / "run"), "prompt")
    assert len(prompts) > 1
    source = json.loads((shards / "manifest.json").read_text())["settings"]["source"]
    texts = [path.read_text() for path in Path(source).glob("*.py")]
    for prompt in prompts:
        assert any(text.startswith(prompt) for text in texts)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("prompts=once upon a time", "Samples has prompts=once upon a time, which is not a file"),
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
    assert len(samples_of(tmp_path / "run")) == 2

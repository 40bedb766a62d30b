"""`--data` with a LightningDataModule of a user: the example of docs/data.md, and others.

The run of the example is made once. Modules lie in the working directory, as the page says.
"""

import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from anlit.cli import main
from tests.docs.pages import ROOT, commands, files
from tests.docs.test_run import copy_texts
from tests.integration.conftest import signal_at, stop_and_continue
from tests.integration.ranks import DDP, FSDP, run_ranks, run_ranks_with_logs
from tests.integration.run_files import (
    column,
    config_of,
    logged,
    model_settings_of,
    record_of,
    samples_of,
    values,
)
from tests.integration.users_data import Words

STEPS = 20
BYTES = 8 * 64
"""Tokens of a batch of the example."""
MINE = "tests.integration.users_data"
Refusal = Callable[..., str]


def typed(command: str) -> list[str]:
    """The arguments of the command of docs/data.md that contains `command`."""
    lines = commands(ROOT / "docs" / "data.md")
    (arguments,) = (line for line in lines if command in line)
    return arguments


def example(run_dir: Path, *extra: str) -> list[str]:
    """The page's `fit` into another folder, with frequent logs and checkpoints."""
    further = ["--trainer.log_every_n_steps=1", "--checkpoint_every_n_steps=4"]
    arguments = [*typed("mydata.Bytes"), *further, "--trainer.enable_progress_bar=false"]
    return [*arguments, f"--run_dir={run_dir}", *extra]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder, with texts and mydata.py."""
    folder = tmp_path_factory.mktemp("reader")
    copy_texts(folder, "json/*.py")
    for name, content in files(ROOT / "docs" / "data.md"):
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Path, str]:
    """The run folder of the example, and its output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        codes, (log,) = run_ranks_with_logs(example(folder / "whole"), 1, folder / "log")
    assert codes == [0], log
    return folder / "whole", log


def fit(data: str, *extra: str) -> list[str]:
    """A tiny run on a class of `users_data`."""
    return [
        "fit", "--model=GPT", "--model.context_length=16", "--model.n_layers=1",
        "--model.n_heads=2", "--model.d_model=8", f"--data={data}", "--trainer.accelerator=cpu",
        "--trainer.max_steps=13", "--trainer.val_check_interval=13",
        "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false", *extra,
    ]  # fmt: skip


def test_the_example_counts_tokens_and_bits_and_records_its_data(whole: tuple[Path, str]) -> None:
    run, log = whole

    assert column(run, "train/tokens") == [*range(BYTES, BYTES * STEPS + 1, BYTES)]
    bits = np.array(column(run, "val/loss")) / math.log(2)
    assert column(run, "val/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    record = record_of(run)["data"]
    assert record["class"] == "mydata.Bytes"
    assert record["vocab_size"] == 256
    assert len(record["content_sha256"]) == 64
    assert config_of(run)["data"]["class_path"] == "mydata.Bytes"
    assert model_settings_of(run)["vocab_size"] == 256
    assert "Bytes does not give tokenizer (anlit generate and score need --tokenizer)." in log
    assert "repeat" not in log, "it continues exactly"


def test_the_example_continues_to_the_bit_where_it_was_killed(
    reader: Path, whole: tuple[Path, str]
) -> None:
    cut = reader / "cut"

    stop_and_continue(example(cut), cut, whole[0], signal_at("SIGKILL", 13))


def test_the_example_is_validated_as_in_training(
    reader: Path, whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = whole
    best = min(column(run, "val/loss"))

    assert main(["validate", str(run)]) == 0
    (loss,) = re.findall(r"val/loss\W+([\d.]+)", capsys.readouterr().out)
    assert float(loss) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("command", ["lengths", "needle", "diagnose"])
def test_evaluations_say_which_data_they_need(
    reader: Path, whole: tuple[Path, str], refusal: Refusal, command: str
) -> None:
    error = refusal(command, whole[0], "--output", "evaluated")

    assert "was trained on 'mydata.Bytes', whose batches this command cannot cut" in error
    assert "set --data to a prepared folder of its tokenizer" in error


def test_other_commands_say_what_is_missing(
    reader: Path, whole: tuple[Path, str], refusal: Refusal
) -> None:
    run, _ = whole

    assert "have no test_dataloader: use `anlit validate`" in refusal("test", run)
    assert "has no tokenizer" in refusal("generate", run, "def")
    (reader / "texts" / "more.txt").write_text("other data")
    changed = refusal(*example(run), "--trainer.max_steps=25", "--ckpt_path=last")
    (reader / "texts" / "more.txt").unlink()
    assert "was trained on data with the fingerprint" in changed


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_have_their_shares_of_the_example(
    reader: Path, whole: tuple[Path, str], strategy: list[str]
) -> None:
    """Two ranks have twice the tokens, and the validation of a single rank."""
    run = reader / strategy[0].rpartition("=")[2]
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]

    assert run_ranks(example(run, *strategy, *steps), 2) == [0, 0]

    assert column(run, "train/tokens") == [2 * BYTES, 4 * BYTES]
    assert column(run, "train/loss") != column(whole[0], "train/loss")[:2]
    assert column(run, "val/loss")[0] == pytest.approx(math.log(256), rel=0.1)


def test_token_data_trains_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    """One rank with four rows, and two ranks with two rows, from the command line."""
    data = [f"--data.train={MINE}.Rows", f"--data.val={MINE}.Rows", "--data.val.n=10"]
    data += ["--data.vocab_size=50", "--trainer.val_check_interval=5"]
    arguments = fit("TokenData", *data)

    one_rank = tmp_path / "one"
    two_ranks = tmp_path / "two"

    assert main([*arguments, "--data.batch_size=4", f"--run_dir={one_rank}"]) == 0
    half_batch = ["--data.batch_size=2", f"--run_dir={two_ranks}", *DDP]
    assert run_ranks([*arguments, *half_batch], 2) == [0, 0]

    for name in ("train/loss", "val/loss", "train/tokens"):
        assert column(two_ranks, name) == pytest.approx(column(one_rank, name))


def test_a_plain_module_trains_and_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its last batch has a single row. A budget of tokens counts full batches."""
    run = tmp_path / "run"
    arguments = fit(f"{MINE}.Pairs", "--model.vocab_size=64", f"--run_dir={run}")

    assert main(arguments) == 0

    sizes = [4 * 16] * 10 + [16] + [4 * 16] * 2
    assert column(run, "train/tokens") == [*itertools.accumulate(sizes)]
    assert not logged(run, "val/bits_per_byte")
    missing = "Pairs does not give bytes_per_token (no bits per byte), tokenizer ("
    assert caplog.text.count(missing) == 1
    repeated = "A continued run would repeat or leave out batches: Pairs saves no position"
    assert repeated in caplog.text

    more = [*arguments, "--trainer.max_steps=15", "--ckpt_path=last"]
    codes, (log,) = run_ranks_with_logs(more, 1, tmp_path / "more")
    assert codes == [0], log
    assert "Continued after step 13 with batches that are not those of an uninterrupted run" in log
    assert "your dataloader is not resumable" not in log, "one sentence is enough"


@pytest.mark.parametrize("data", ["Words", "Numbers"])
def test_samples_take_the_tokenizer_of_the_data_or_of_their_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Words().tokenizer.save("words.json")
    settings = {"prompts": ["1 2", "3"], "max_tokens": 2}
    if data == "Numbers":
        settings["tokenizer"] = "words.json"
    callbacks = [{"class_path": "anlit.Samples", "init_args": settings}]
    sample = [f"--trainer.callbacks={json.dumps(callbacks)}", "--model.vocab_size=64"]

    assert main(fit(f"{MINE}.{data}", *sample, "--run_dir=run")) == 0

    assert values(samples_of(tmp_path / "run"), "prompt") == ["1 2", "3"]


def test_a_module_without_validation_finishes_and_says_so(tmp_path: Path, caplog) -> None:
    run = tmp_path / "run"

    assert main(fit(f"{MINE}.TrainingAlone", f"--run_dir={run}")) == 0

    assert "TrainingAlone has no validation data" in caplog.text
    assert record_of(run)["status"] == "finished"
    assert column(run, "train/tokens")[0] == 4 * 16
    assert not logged(run, "val/loss")


def test_a_loader_without_a_length_is_no_exact_resume(tmp_path: Path, caplog) -> None:
    arguments = fit(f"{MINE}.WithoutLength", "--model.vocab_size=64", "--trainer.max_steps=2")

    assert main([*arguments, f"--run_dir={tmp_path / 'run'}"]) == 0

    assert "the training loader of WithoutLength has no length" in caplog.text


@pytest.mark.parametrize(
    ("data", "extra", "sentence"),
    [
        ("nowhere.MyData", "", r"importing nowhere fails \(ModuleNotFoundError: .*: correct the"),
        ("broken.MyData", "", r"importing broken fails \(ZeroDivisionError: .*\): correct the"),
        (f"{MINE}.Missing", "", r"users_data has no Missing: give a class that it has"),
        (f"{MINE}.NoData", "", r"which is not a LightningDataModule: derive it from lightning's"),
        (f"{MINE}.Pairs", "", r"Pairs does not give the size of its vocabulary: set --model\.vo"),
        (f"{MINE}.Pairs", "--model.vocab_size=40", r"Pairs delivers the (token|target) 4\d, and"),
        (f"{MINE}.TrainingAlone", "--model.vocab_size=40",
         r"40 tokens and TrainingAlone has 50: s"),
        (f"{MINE}.TrainingAlone", "--max_tokens=500",
         r"TrainingAlone has no setting batch_size.*: set trainer\.max_steps"),
        (f"{MINE}.Pairs", "--model.vocab_size=64 --model.context_length=32 --max_tokens=500",
         r"counts batches of 4×32 tokens, and the first of Pairs has 4×16: set trainer\.max"),
        (f"{MINE}.Pairs", "--model.vocab_size=64 --model.context_length=8",
         r"Pairs delivers rows of 16 tokens, and model\.context_length=8: set --model\.con"),
        (f"{MINE}.Floats", "--model.vocab_size=64", r"Floats delivers tokens in float32: give int"),
        (f"{MINE}.Pairs", "--data.last=1", r"data\.last is not a setting of .*Pairs: choose one"),
    ],
)  # fmt: skip
def test_data_that_cannot_train_are_refused_in_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    data: str,
    extra: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0")
    arguments = fit(data, *extra.split())
    if "max_tokens" in extra:
        arguments.remove("--trainer.max_steps=13")
        arguments.append("--trainer.max_steps=-1")

    assert re.search(sentence, refusal(*arguments, "--run_dir=run"))

    assert not Path("run").exists()


@pytest.mark.parametrize("model", ["GPT", "tests.integration.users_models.Bigram"])
def test_a_run_that_fails_after_a_step_keeps_its_folder_before_it_has_logged(
    tmp_path: Path, refusal: Refusal, model: str
) -> None:
    run = tmp_path / "run"
    settings = ["--model.vocab_size=50", "--trainer.log_every_n_steps=9", f"--run_dir={run}"]
    arguments = [*fit(f"{MINE}.LateMistake"), f"--model={model}", *settings]

    assert "LateMistake delivers the token 50" in refusal(*arguments)

    assert record_of(run)["status"] == "failed"


def test_compare_knows_same_data_by_class_and_settings_or_by_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--trainer.max_steps=2", "--model.vocab_size=64"]
    runs = tmp_path / "runs"
    settings = {"a": ["--model.n_layers=2"], "b": [], "other": ["--data.first=3"]}
    for name, extra in settings.items():
        assert main(fit(f"{MINE}.Pairs", *short, *extra, f"--run_dir={runs / name}")) == 0

    assert main(["compare", str(runs), "--output", str(tmp_path / "report")]) == 0

    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("validated on data that may be other data") >= 1
    assert "Pairs gives no fingerprint and its settings differ, give it one" in printed
    assert "(validated differently)" in printed


BARE_NAMES = """
import os, sys
import jsonargparse, lightning.pytorch.cli
from anlit.cli import main
for number, command in enumerate(sys.argv[1:]):
    if os.fork() == 0:
        file = os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            main(command.split())
        finally:
            sys.stdout.flush()
            os._exit(0)  # to free the libraries' objects takes longer than the command
    os.wait()
"""
"""A program whose children each run a command, before anything has imported anlit's classes."""


def test_bare_names_of_corpora_are_found_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser finds bare names of imported classes alone."""
    monkeypatch.chdir(tmp_path)
    expected = {}
    for name in ("TextFiles", "Mixture", "NeedleInHaystack", "TokenData"):
        expected[f"fit --data.help={name}"] = f"Help for --data.help=anlit.{name}"
        expected[f"fit --model=GPT --data={name}"] = "anlit fit needs --data."

    subprocess.run([sys.executable, "-c", BARE_NAMES, *expected], check=True)

    for number, sentence in enumerate(expected.values()):
        assert sentence in Path(f"{number}.txt").read_text()

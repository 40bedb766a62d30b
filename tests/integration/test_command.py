"""The command line: every shipped YAML builds, and a run folder is complete."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml

from anlit.cli import main
from anlit.training.load_model import load_checkpoint
from tests.integration.conftest import fit_arguments, last_checkpoint
from tests.integration.run_files import column, model_settings_of, record_of

ROOT = Path(__file__).parents[2]
MODELS = ("gpt", "ngpt", "angpt")
# A fragment whose name begins with a model's is for that model alone.
FOLDERS = ("block", "runtime", "optimizer", "data", "trainer")


def merged() -> list[tuple[str, Path]]:
    """Models and the fragments that each may have."""
    pairs = []
    for folder in FOLDERS:
        for path in sorted((ROOT / "configs" / folder).iterdir()):
            beginning = path.stem.partition("_")[0]
            for model in MODELS:
                if beginning == model or beginning not in MODELS:
                    pairs.append((model, path))
    return pairs


@pytest.mark.parametrize(
    ("model", "path"), merged(), ids=lambda value: getattr(value, "stem", value)
)
@pytest.mark.covering(1)
def test_fragments_merge_with_every_model(printed_config, model: str, path: Path) -> None:
    """tests/nn/attention/test_fragments.py has the fragments of attention."""
    content = json.loads(json.dumps(yaml.safe_load(path.read_text())))  # printed keys are strings
    corpus = [] if "data" in content else ["--data=PythonSources"]
    if "class_path" not in content.get("data", {"class_path": ""}):  # a fragment for any corpus
        corpus = ["--config=data/fineweb.yaml"]
    config = printed_config(f"--config=model/{model}.yaml", *corpus, f"--config={path}")
    assert part_of(config, content) == content


def part_of(resolved: Any, content: Any) -> Any:
    """Return the values of `resolved` under the keys of `content`. A key with + adds to a list."""
    if isinstance(content, dict):
        part = {}
        for key, value in content.items():
            part[key] = part_of(resolved[key.removesuffix("+")], value)
        return part
    if isinstance(content, list) and all(isinstance(value, dict) for value in content):
        return [part_of(*pair) for pair in zip(resolved, content, strict=True)]
    return resolved


def test_settings_before_the_file_of_their_class_are_merged(printed_config, tmp_path: Path) -> None:
    """The later file wins, and no setting of the earlier file is lost."""
    files = {
        "small.yaml": {"model": {"init_args": {"d_model": 64, "alpha_init": 0.2, "z_loss": 0.1}}},
        "corpus.yaml": {"data": {"init_args": {"vocab_size": 512, "val_blocks": 8}}},
        "classes.yaml": {
            "model": {"class_path": "anlit.AnGPT", "init_args": {"z_loss": 0.3}},
            "data": {"class_path": "anlit.PythonSources"},
        },
    }
    options = []
    for name, content in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
        options.append(f"--config={tmp_path}/{name}")

    config = printed_config(*options)

    model = config["model"]["init_args"]
    assert config["model"]["class_path"] == "anlit.AnGPT"
    assert (model["d_model"], model["alpha_init"], model["z_loss"]) == (64, 0.2, 0.3)
    assert config["data"]["class_path"] == "anlit.PythonSources"
    data = config["data"]["init_args"]
    assert (data["vocab_size"], data["val_blocks"]) == (512, 8)


def test_settings_that_the_class_of_a_later_file_lacks_are_refused(refusal, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("model: {init_args: {alpha_init: 0.2}}")
    error = refusal("fit", f"--config={tmp_path}/small.yaml", "--config=model/gpt.yaml")
    assert "model.alpha_init is not a setting of anlit.GPT" in error


def test_context_schedule_survives_a_saved_configuration(printed_config, tmp_path: Path) -> None:
    fragments = ("--config=data/fineweb.yaml", "--config=data/context_warmup.yaml")
    printed = printed_config("--model=GPT", *fragments)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(printed))

    reloaded = printed_config(f"--config={tmp_path}/config.yaml")
    assert reloaded["data"]["init_args"]["context_schedule"] == {"0": 1024, "5000": 2048}


def test_a_configuration_is_read_from_this_machine_alone(
    shards: Path, tmp_path: Path, refusal
) -> None:
    """Lightning would ask any address that fsspec knows, `s3://…` with the user's credentials."""
    fsspec.filesystem("memory").pipe("/attention.yaml", b"class_path: anlit.LogN\n")
    error = refusal(
        *fit_arguments(shards, tmp_path / "run", "--model.attention=memory://attention.yaml")
    )
    assert "model.attention names memory://attention.yaml, which is not a class for it" in error


def test_run_folder_is_complete(finished: Path) -> None:
    record = record_of(finished)
    weights = last_checkpoint(finished)["state_dict"]
    assert record["status"] == "finished"
    assert record["parameters"] == sum(map(torch.numel, weights.values()))
    (launch,) = record["launches"]
    assert {"started", "versions", "git", "hardware", "command"} <= launch.keys()
    assert record["data"]["content_sha256"]
    assert model_settings_of(finished)["d_ff"] is None
    assert list(finished.glob("events.out.tfevents.*"))
    with (finished / "metrics.csv").open(newline="") as file:
        columns = set(next(csv.reader(file)))
    assert {
        "train/loss",
        "val/loss",
        "val/perplexity",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens",
        "train/tokens_per_second",
        "scaling/alpha_A",
        "scaling/s_z",
        "norms/row_max",
    } <= columns
    assert "val/bits_per_byte" not in columns, (
        "a validation that is cut has other bytes per token than the split"
    )


def test_validate_reads_a_run_folder(tmp_path: Path, finished: Path, capfd) -> None:
    """Also a folder that was moved."""
    run_dir = shutil.copytree(finished, tmp_path / "moved")
    best = run_dir / "checkpoints" / "best.ckpt"
    assert load_checkpoint(str(best), "cpu").architecture == "AnGPT"
    config = f"--config={run_dir}/config.yaml"
    for checkpoint in ([], [f"--ckpt_path={run_dir}"]):  # both are the run's best
        assert main(["validate", config, *checkpoint]) == 0
        captured = capfd.readouterr()
        loss = column(run_dir, "val/loss")[-1]
        assert re.search(rf"^val/loss +{loss:.6g}$", captured.out, re.MULTILINE)
        assert captured.out.count("val/loss") == 1, "Lightning prints no second table"
        assert f"validate: {best}" in captured.out


def test_validate_prints_a_table_if_it_may_and_loggers_have_all_digits(
    tmp_path: Path, finished: Path, capfd
) -> None:
    logger = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]

    assert main(["validate", str(finished), "--verbose=false", *logger]) == 0

    assert "val/loss" not in capfd.readouterr().out
    (log,) = tmp_path.rglob("metrics.csv")
    with log.open(newline="") as file:
        (row,) = csv.DictReader(file)
    loss = column(finished, "val/loss")[-1]
    assert len(row["val/loss"]) > len(f"{loss:.6g}")
    assert float(row["val/loss"]) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("command", "limit"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")]
)
def test_an_evaluation_of_no_batch_is_refused(
    command: str, limit: str, finished: Path, refusal
) -> None:
    """A run's configuration may have this limit. Lightning would print nothing."""
    message = refusal(command, finished, f"--trainer.{limit}=0")

    assert f"trainer.{limit}=0 evaluates nothing: give --trainer.{limit} 1.0" in message


def test_true_is_no_seed(refusal) -> None:
    """Lightning's help promises a random seed, and its function sets 0."""
    message = refusal("fit", "--model=GPT", "--data.path=data", "--seed_everything=true")

    assert "seed_everything=true is not a seed: give a number" in message


def test_output_without_a_reader_gives_no_traceback() -> None:
    """As in `anlit compare --help | head -1`."""
    buffered = dict(os.environ)
    buffered.pop("PYTHONUNBUFFERED", None)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "anlit", "benchmark", "--help"]
    with os.fdopen(writing, "wb") as closed:
        result = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, env=buffered, text=True
        )
    assert (result.returncode, result.stderr) == (1, "")


PROGRAM = """
import json, sys
from anlit.cli import main
for command in json.loads(sys.argv[1]):
    print(">", command[0], file=sys.stderr, flush=True)
    assert main(command) == 0
"""


def test_no_warning_of_a_library_reaches_the_terminal(shards: Path, tmp_path: Path) -> None:
    """A run starts with `--ckpt_path last`, as in the demo, continues, and goes through tools."""
    run_dir = tmp_path / "runs" / "run"
    ones = (
        "--trainer.limit_val_batches=1.0",
        "--data.val_blocks=4",
        "--trainer.val_check_interval=1",
    )
    first_start = fit_arguments(
        shards, run_dir, "--trainer.max_steps=4", *ones, "--ckpt_path=last", model="GPT"
    )
    commands = [
        first_start,
        [*first_start, "--trainer.max_steps=6"],
        ["validate", f"--config={run_dir}/config.yaml"],
        ["compare", str(run_dir), "--output", str(tmp_path / "compare")],
        ["export", str(run_dir), "--output", str(tmp_path / "export")],
    ]
    everything = {
        **os.environ,
        "PYTHONWARNINGS": "default",
    }  # deprecations too, which Python hides by default
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    result = subprocess.run(program, capture_output=True, text=True, env=everything, check=False)
    assert result.returncode == 0, result.stderr
    own_lines = ("Continued with changed settings", "The learning rate of step 5 is")
    noise = [line for line in result.stderr.splitlines() if not line.startswith(own_lines)]
    assert noise == ["> fit", "> fit", "> validate", "> compare", "> export"]
    assert f"validate: {run_dir}/checkpoints/best.ckpt" in result.stdout, "not the last one"


SMALL = [
    "--model.context_length=32",
    "--model.n_layers=1",
    "--model.n_heads=2",
    "--model.d_model=16",
]
CORPUS = ["--data=TextFiles", "--data.source=texts", "--data.path=shards", "--data.vocab_size=300"]


def test_model_takes_the_vocabulary_of_its_data(tmp_path: Path, monkeypatch) -> None:
    """`anlit size` does so too, before they exist."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(40):
        words = [f"word{index}" for index in range(7 * number, 7 * number + 60)]
        Path(f"texts/{number}.txt").write_text(" ".join(words))
    for corpus, vocabulary in ((CORPUS, 384), (["--data=FineWeb"], 50_304)):
        size = ["size", "--model=GPT", *SMALL, *corpus, "--json", "size.json"]
        counts = []
        for option in ([], [f"--model.vocab_size={vocabulary}"]):
            assert main([*size, *option]) == 0
            counts.append(json.loads(Path("size.json").read_text())["parameters"])
        assert counts[0] == counts[1]
    trainer = [
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=1",
    ]
    assert main(["fit", "--model=AnGPT", *SMALL, *CORPUS, *trainer, "--run_dir=run"]) == 0
    checkpoint = last_checkpoint(Path("run"))
    settings = model_settings_of(Path("run"))
    assert settings["vocab_size"] == 384  # 300 rounded up to a multiple of 128
    assert checkpoint["hyper_parameters"]["vocab_size"] == 384
    assert checkpoint["state_dict"]["model.embedding.weight"].shape == (384, 16)


@pytest.mark.parametrize(
    "option", ["model", "model.attention", "model.optimizer", "trainer.callbacks"]
)
@pytest.mark.parametrize(
    "mistake",
    ["1 / 0", "import nowhere", "class A(:", "raise ValueError(1)", "raise SystemExit(0)"],
)
def test_a_module_of_the_user_that_cannot_be_imported(
    option: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mistaken.py").write_text(mistake)

    message = refusal("fit", "--model=GPT", f"--{option}=mistaken.A", "--data.path=data")

    assert "names mistaken.A, and importing mistaken fails (" in message
    message = refusal("generate", "run", "hello", "--import", "mistaken")
    assert "--import mistaken fails (" in message
    assert message.rstrip().endswith("): correct the module")


def test_a_class_that_the_users_module_lacks(tmp_path: Path, monkeypatch, refusal) -> None:
    monkeypatch.chdir(tmp_path)
    Path("without_classes.py").touch()

    message = refusal("fit", "--model=GPT", "--model.attention=without_classes.A")

    assert "since without_classes has no A: choose ALiBi" in message

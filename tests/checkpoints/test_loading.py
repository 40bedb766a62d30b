"""Models are loaded from folders and files; files that are no checkpoint are refused."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit import GPT, AnGPT, PRoPE
from anlit.checkpoints.location import find_checkpoint
from anlit.cli import main
from anlit.errors import UserError
from anlit.evaluation.data import load_validation_data
from anlit.training.load_model import describe, load_checkpoint
from tests.checkpoints.foreign import FORMS, content_of, refused
from tests.evaluation.saved import LENGTH, VOCABULARY, make_run, prepare, save, small


def test_the_saved_model_of_a_run_is_rebuilt(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "angpt", data, AnGPT, positions=PRoPE(), document_masking=False)

    checkpoint = load_checkpoint(str(run), "cpu")

    model = checkpoint.model
    saved = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    torch.testing.assert_close(model.state_dict(), saved["state_dict"], rtol=0, atol=0)
    assert type(model) is AnGPT
    assert not model.model.document_masking
    assert not model.training
    for weight in model.parameters():
        assert not weight.requires_grad


def test_a_checkpoint_knows_its_run_and_its_data(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "angpt", data, AnGPT)

    checkpoint = load_checkpoint(str(run), "cpu")

    assert checkpoint.label == "anGPT, scale-invariant"
    assert checkpoint.step == 1
    assert checkpoint.training_length == LENGTH
    assert checkpoint.run == run
    record = describe(checkpoint)
    assert record["architecture"] == "AnGPT"
    assert record["seed"] == 1
    shards = load_validation_data(checkpoint)
    assert shards.path == str(data)
    assert shards.batch_size == 4
    assert shards.context_length == LENGTH


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("command", ["generate", "fit", "validate"])
def test_a_model_of_transformers_is_to_be_imported_in_one_file_or_several(
    tmp_path: Path, monkeypatch, refusal, trained_run: Path, command: str, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen").mkdir()
    Path("qwen", "config.json").write_text('{"model_type": "qwen3"}')
    Path("qwen", file).touch()
    arguments = [f"--config={trained_run}/config.yaml", "--ckpt_path=qwen", "--run_dir=new"]
    if command == "generate":
        arguments = ["qwen", "Once"]

    error = refusal(command, *arguments)

    assert "qwen is a model of transformers: import it first, with anlit import qwen" in error


@pytest.mark.parametrize("content", ['{"model_type": "gpt"}', "[1]"])
def test_a_run_may_hold_a_file_of_the_users(tmp_path: Path, data: Path, content: str) -> None:
    run = make_run(tmp_path / "run", data, GPT, name="last")
    (run / "config.json").write_text(content)

    assert find_checkpoint(str(run)) == run / "checkpoints" / "last.ckpt"


def test_a_folder_means_its_best_checkpoint_and_else_its_last(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", data, GPT, name="last")
    last = run / "checkpoints" / "last.ckpt"
    assert load_checkpoint(str(run)).file == last

    make_run(run, data, GPT, name="best")

    assert load_checkpoint(str(run)).file == run / "checkpoints" / "best.ckpt"
    assert load_checkpoint(str(last)).file == last


MEASURE = """
import sys
from pathlib import Path
from anlit.training.load_model import load_checkpoint

def largest_memory():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

load_checkpoint(sys.argv[1], "cpu")
memory = largest_memory()
checkpoint = load_checkpoint(sys.argv[2], "cpu")
for weight in checkpoint.model.parameters():
    weight.sum()
print(largest_memory() - memory)
"""
"""Loads a small model, then a large model, and prints the memory of the large model."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_a_model_takes_the_memory_of_its_weights_once(tmp_path: Path) -> None:
    large_model = small(GPT, d_model=768, n_layers=3)
    n_bytes = sum(weight.nbytes for weight in large_model.parameters())
    small_file = save(small(GPT, d_model=32, n_layers=3), tmp_path / "small.ckpt")
    large_file = save(large_model, tmp_path / "large.ckpt")

    command = [sys.executable, "-c", MEASURE, str(small_file), str(large_file)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert int(printed) < 1.5 * n_bytes


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no checkpoints/best.ckpt or last.ckpt" in refused(tmp_path)


@pytest.mark.parametrize("n_bytes", [2000, 0], ids=["cut short", "empty"])
def test_a_shortened_file_is_refused(tmp_path: Path, n_bytes: int) -> None:
    """More damage is in tests/integration/test_damaged_checkpoints.py."""
    file = save(small(GPT), tmp_path / "a.ckpt")
    file.write_bytes(file.read_bytes()[:n_bytes])

    assert "a.ckpt cannot be read as a checkpoint (a.ckpt is empty, cut short" in refused(file)


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.ckpt"
    file.write_text("not a checkpoint\n")

    assert "a.ckpt cannot be read as a checkpoint (a.ckpt is empty, cut short" in refused(file)


def small_content(folder: Path) -> dict[str, Any]:
    """The content of a small model's checkpoint."""
    file = save(small(GPT), folder / "a.ckpt")
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("anlit", None, "anlit did not write it"),
        ("hyper_parameters", None, "hyper_parameters is missing"),
        ("state_dict", {"a": 5}, "not all of state_dict are tensors"),
    ],
)
def test_a_foreign_entry_is_refused(tmp_path: Path, entry: str, value: Any, message: str) -> None:
    content = small_content(tmp_path)
    content[entry] = value

    assert message in refused_content(content, tmp_path)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("architecture", "Mamba", "names 'Mamba', which is no LanguageModel of anlit"),
        ("data", 5, "anlit.data is int in place of dict"),
    ],
)
def test_a_foreign_entry_of_the_record_is_refused(
    tmp_path: Path, entry: str, value: Any, message: str
) -> None:
    content = small_content(tmp_path)
    content["anlit"][entry] = value

    assert message in refused_content(content, tmp_path)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("model.embedding.weight", "has no matrix model.embedding.weight among its weights"),
        ("model.head.weight", 'Missing key(s) in state_dict: "model.head.weight"'),
    ],
)
def test_a_missing_weight_is_refused(tmp_path: Path, weight: str, message: str) -> None:
    content = small_content(tmp_path)
    del content["state_dict"][weight]

    assert message in refused_content(content, tmp_path)


def refused_content(content: dict[str, Any], folder: Path) -> str:
    """The message of the error when a file with this content is loaded."""
    file = folder / "changed.ckpt"
    torch.save(content, file)
    return refused(file)


def test_a_checkpoint_outside_of_a_run_has_no_data(tmp_path: Path) -> None:
    file = save(small(GPT), tmp_path / "lone.ckpt")
    checkpoint = load_checkpoint(str(file))

    assert checkpoint.config is None
    assert checkpoint.run is None
    assert checkpoint.trained_on is None
    with pytest.raises(UserError, match="is not in a run folder that names its data: set --data"):
        load_validation_data(checkpoint)


def test_data_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Data of another tokenizer: tests/integration/mistakes.py."""
    file = save(small(GPT), tmp_path / "lone.ckpt")
    checkpoint = load_checkpoint(str(file))
    shards = prepare(tmp_path / "shards")
    message = f"vocabulary of 29 tokens and the shards in {shards} have {VOCABULARY}"

    with pytest.raises(UserError, match=message):
        load_validation_data(checkpoint, str(shards))


@pytest.mark.parametrize("setting", ["n_layers", "vocab_size", "d_model", "d_ff"])
@pytest.mark.parametrize("form", ["file", "export"])
@pytest.mark.covering(1)
def test_settings_of_a_larger_model_than_the_weights_are_refused(
    form: str, setting: str, trained_run: Path, tmp_path: Path
) -> None:
    write = FORMS[form]
    path = write(trained_run, tmp_path, {setting: 10**9})

    message = refused(path, device="cpu")

    assert f"settings have {setting}=1000000000, but its weights have {setting}=" in message


def test_weights_that_are_views_of_a_small_tensor_are_refused(
    trained_run: Path, tmp_path: Path
) -> None:
    content = content_of(trained_run, {"vocab_size": 10**9, "d_model": 10**6})
    view = torch.zeros(1).expand(10**9, 10**6)
    content["state_dict"]["model.embedding.weight"] = view

    assert "bytes of weights and holds" in refused_content(content, tmp_path)


def spoil_checkpoint(run: Path, folder: Path) -> Path:
    """Put an infinite weight into the run's checkpoint."""
    file = run / "checkpoints" / "best.ckpt"
    content = torch.load(file, weights_only=True)
    content["state_dict"]["model.embedding.weight"][3, 2] = math.inf
    torch.save(content, file)
    return run


def spoil_export(run: Path, folder: Path) -> Path:
    """Put a NaN into an export of the run."""
    exported = folder / "exported"
    assert main(["export", str(run), "--output", str(exported)]) == 0
    file = exported / "model.safetensors"
    weights = load_file(file)
    weights["embedding.weight"][3, 2] = math.nan
    save_file(weights, file)
    return exported


COMMANDS = {
    "lengths": "--data {data} --output {out}",
    "diagnose": "--data {data} --output {out}",
    "export": "--output {out}",
    "generate": "a",
    "score": "{text} --output {out}",
}
"""Commands that read a model → their options."""


@pytest.mark.parametrize("spoil", [spoil_checkpoint, spoil_export], ids=["checkpoint", "export"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.covering(1)
def test_weights_that_are_not_finite_are_refused_in_one_sentence(
    spoil: Callable[[Path, Path], Path], command: str, tmp_path: Path, data: Path, refusal
) -> None:
    model = spoil(make_run(tmp_path / "run", data, GPT), tmp_path)
    text = tmp_path / "text"
    text.write_text("text")
    options = COMMANDS[command].format(data=data, out=tmp_path / "out", text=text)

    message = refusal(command, model, *options.split())

    assert "holds weights that are NaN or infinite (model.embedding.weight)" in message

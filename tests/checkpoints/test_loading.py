"""From folders and files to models, and every file that is refused."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit import GPT, AnGPT, PRoPE
from anlit.cli import main
from anlit.errors import UserError
from anlit.evaluation.data import load_validation_data
from anlit.training.load_model import describe, load_checkpoint
from tests.checkpoints.foreign import FORMS, content_of, refused
from tests.evaluation.saved import LENGTH, VOCABULARY, make_run, prepare, save, small


def test_the_model_of_a_run_is_rebuilt_as_it_was_saved(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "angpt", data, AnGPT, positions=PRoPE(), document_masking=False)
    checkpoint = load_checkpoint(str(run), "cpu")
    saved = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    torch.testing.assert_close(checkpoint.model.state_dict(), saved["state_dict"], rtol=0, atol=0)
    assert type(checkpoint.model) is AnGPT
    assert not checkpoint.model.model.document_masking
    assert not checkpoint.model.training
    assert not any(weight.requires_grad for weight in checkpoint.model.parameters())
    assert checkpoint.label == "anGPT, scale-invariant"
    assert (checkpoint.step, checkpoint.training_length, checkpoint.run) == (1, LENGTH, run)
    assert (describe(checkpoint)["architecture"], describe(checkpoint)["seed"]) == ("AnGPT", 1)
    own = load_validation_data(checkpoint)
    assert (own.path, own.batch_size, own.context_length) == (str(data), 4, LENGTH)


def test_a_folder_means_its_best_checkpoint_and_else_its_last(tmp_path: Path, data: Path) -> None:
    folder = make_run(tmp_path / "run", data, GPT, name="last")
    assert load_checkpoint(str(folder)).file == folder / "checkpoints" / "last.ckpt"
    make_run(folder, data, GPT, name="best")
    assert load_checkpoint(str(folder)).file == folder / "checkpoints" / "best.ckpt"
    assert load_checkpoint(str(folder / "checkpoints" / "last.ckpt")).file.name == "last.ckpt"


MEASURE = """
import sys
from pathlib import Path
from anlit.training.load_model import load_checkpoint

def largest_memory():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

load_checkpoint(sys.argv[1], "cpu")
before = largest_memory()
checkpoint = load_checkpoint(sys.argv[2], "cpu")
for weight in checkpoint.model.parameters():
    weight.sum()
print(largest_memory() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_a_model_takes_the_memory_of_its_weights_once(tmp_path: Path) -> None:
    files = [
        save(small(GPT, d_model=width, n_layers=3), tmp_path / f"{width}.ckpt")
        for width in (32, 768)
    ]
    weights = load_checkpoint(str(files[1]), "cpu").model.parameters()
    n_bytes = sum(weight.nbytes for weight in weights)
    command = [sys.executable, "-c", MEASURE, *map(str, files)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(printed) < 1.5 * n_bytes


def test_what_is_no_checkpoint_of_anlit_is_refused(tmp_path: Path) -> None:
    """Damaged ones: tests/integration/test_damaged_checkpoints.py."""
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "has no checkpoints/best.ckpt or last.ckpt" in refused(tmp_path)
    file = save(small(GPT), tmp_path / "a.ckpt")
    whole, content = file.read_bytes(), torch.load(file, weights_only=True)
    for damaged in (whole[:2000], b"not a checkpoint\n", b""):
        file.write_bytes(damaged)
        assert "a.ckpt cannot be read as a checkpoint (a.ckpt is empty, cut short" in refused(file)

    def without(weight: str) -> dict[str, Any]:
        kept = {name: value for name, value in content["state_dict"].items() if name != weight}
        return {"state_dict": kept}

    for changed, sentence in (
        ({"anlit": None}, "anlit did not write it"),
        (
            {"anlit": {**content["anlit"], "architecture": "Mamba"}},
            "names 'Mamba', which is no LanguageModel of anlit",
        ),
        ({"anlit": {**content["anlit"], "data": 5}}, "anlit.data is int in place of dict"),
        ({"hyper_parameters": None}, "hyper_parameters is missing"),
        ({"state_dict": {"a": 5}}, "not all of state_dict are tensors"),
        (
            without("model.embedding.weight"),
            "has no matrix model.embedding.weight among its weights",
        ),
        (without("model.head.weight"), 'Missing key(s) in state_dict: "model.head.weight"'),
    ):
        torch.save(content | changed, file)
        assert sentence in refused(file)


def test_data_are_those_of_the_run_or_named(tmp_path: Path) -> None:
    """Of the same tokenizer: tests/integration/mistakes.py."""
    alone = load_checkpoint(str(save(small(GPT), tmp_path / "alone.ckpt")))
    assert (alone.config, alone.run, alone.trained_on) == (None, None, None)
    other = prepare(tmp_path / "other")
    with pytest.raises(UserError, match="is not in a run folder that names its data: set --data"):
        load_validation_data(alone)
    with pytest.raises(
        UserError, match=f"vocabulary of 29 tokens and the shards in {other} have {VOCABULARY}"
    ):
        load_validation_data(alone, str(other))


@pytest.mark.parametrize("setting", ["n_layers", "vocab_size", "d_model", "d_ff"])
@pytest.mark.parametrize("form", ["file", "export"])
@pytest.mark.covering(1)
def test_settings_of_a_larger_model_than_the_weights_are_refused(
    form: str, setting: str, trained_run: Path, tmp_path: Path
) -> None:
    path = FORMS[form](trained_run, tmp_path, {setting: 10**9})
    message = refused(path, device="cpu")
    assert f"settings have {setting}=1000000000, but its weights have {setting}=" in message


def test_weights_that_are_views_of_a_small_tensor_are_refused(
    trained_run: Path, tmp_path: Path
) -> None:
    content = content_of(trained_run, {"vocab_size": 10**9, "d_model": 10**6})
    content["state_dict"]["model.embedding.weight"] = torch.zeros(1).expand(10**9, 10**6)
    torch.save(content, tmp_path / "a.ckpt")
    assert "bytes of weights and holds" in refused(tmp_path / "a.ckpt")


@pytest.mark.parametrize("form", ["checkpoint", "export"])
@pytest.mark.parametrize("command", ["lengths", "export", "generate", "score", "diagnose"])
@pytest.mark.covering(1)
def test_weights_that_are_nan_are_refused_in_one_sentence(
    form: str, command: str, tmp_path: Path, data: Path, refusal
) -> None:
    run = make_run(tmp_path / "run", data, GPT)
    source = run
    if form == "export":
        source = tmp_path / "exported"
        assert main(["export", str(run), "--output", str(source)]) == 0
        file = source / "model.safetensors"
        weights = load_file(file)
        weights["embedding.weight"][3, 2] = math.nan
        save_file(weights, file)
    else:
        file = run / "checkpoints" / "best.ckpt"
        content = torch.load(file, weights_only=True)
        content["state_dict"]["model.embedding.weight"][3, 2] = math.inf
        torch.save(content, file)
    (tmp_path / "text").write_text("text")
    out = tmp_path / "out"
    options = {
        "lengths": ["--data", data, "--output", out],
        "diagnose": ["--data", data, "--output", out],
        "export": ["--output", out],
        "generate": ["a"],
        "score": [tmp_path / "text", "--output", out],
    }
    said = refusal(command, source, *options[command])
    assert "holds weights that are NaN or infinite (model.embedding.weight)" in said

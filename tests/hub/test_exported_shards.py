"""An export whose weights are in several files is read like one of a single file."""

import inspect
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anlit import GPT, NGPT, AnGPT
from anlit.checkpoints import weight_files
from anlit.checkpoints.location import MAX_SHARD_SIZE
from anlit.checkpoints.weight_files import WeightFormat, read_weights, write_weights
from anlit.cli import main
from anlit.commands.shard_size import file_size
from anlit.errors import UserError
from anlit.training.initial_weights import load_initial_weights
from anlit.training.load_model import load_checkpoint
from tests.evaluation.saved import make_run_with_text, save, small
from tests.hub.models import PROMPT, export, import_model, read
from tests.hub.published import published
from tests.nn.models.tiny import tiny

pytestmark = pytest.mark.usefixtures("own_code_cache")

INDEX = "model.safetensors.index.json"
MANY = "--max_shard_size=4KB"
FOR_TRANSFORMERS = "--format=huggingface"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*-of-*.safetensors"))


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    """An export in shards."""
    return export(run, tmp_path / "exported", MANY)


def test_shards_and_their_index_replace_the_single_file(run: Path, tmp_path: Path) -> None:
    whole = load_file(export(run, tmp_path / "whole") / "model.safetensors")

    out = export(run, tmp_path / "out", MANY)

    assert not (out / "model.safetensors").exists()
    record = json.loads((out / INDEX).read_text())
    files_in_index = record["weight_map"]
    assert record["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    merged = {}
    for file in shards(out):
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 4000 or len(tensors) == 1
        for name in tensors:
            assert files_in_index[name] == file.name
        merged |= tensors
    assert len(shards(out)) > 2
    torch.testing.assert_close(merged, whole, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_transformers_reads_shards(architecture: Any, tmp_path: Path) -> None:
    run = save(small(architecture), tmp_path / "a.ckpt")
    whole = read(export(run, tmp_path / "whole", FOR_TRANSFORMERS), trust=True)

    sharded = export(run, tmp_path / "out", FOR_TRANSFORMERS, MANY)
    model = read(sharded, trust=True)
    model.save_pretrained(tmp_path / "again", max_shard_size="3KB")
    again = read(tmp_path / "again", trust=True)

    assert len(shards(sharded)) > 2
    assert len(shards(tmp_path / "again")) > 2
    expected = whole(PROMPT).logits
    torch.testing.assert_close(model(PROMPT).logits, expected)
    torch.testing.assert_close(again(PROMPT).logits, expected)


COMMANDS = {
    "generate": "the --max_tokens=5 --temperature=0",
    "score": "{text} --output={out}.parquet",
    "lengths": "--data={data} --lengths=16 --output={out}",
    "export": "--output={out}",
}
"""Commands that take an exported folder → their options."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_shards(
    command: str, run: Path, exported: Path, tmp_path: Path, capsys
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat")
    out = tmp_path / "out"
    options = COMMANDS[command].format(data=run.parent / "data", text=text, out=out)

    capsys.readouterr()
    assert main([command, str(exported), *options.split()]) == 0

    printed = capsys.readouterr().out
    if command == "generate":
        assert main(["generate", str(run), *options.split()]) == 0
        assert printed == capsys.readouterr().out
    if command == "export":
        loaded = load_checkpoint(str(out), "cpu").model.state_dict()
        expected = load_checkpoint(str(run), "cpu").model.state_dict()
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


def test_a_run_begins_from_shards(tmp_path: Path) -> None:
    original = small(GPT)
    out = export(save(original, tmp_path / "a.ckpt"), tmp_path / "out", MANY)
    model = tiny(GPT, seed=2, attention=original.hparams["attention"], n_layers=1)

    load_initial_weights(model, str(out))

    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)


def lose_a_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def cut_a_shard(folder: Path) -> None:
    file = shards(folder)[1]
    file.write_bytes(file.read_bytes()[:-7])


def name_a_missing_tensor(folder: Path) -> None:
    record = json.loads((folder / INDEX).read_text())
    record["weight_map"]["blocks.9.W_q.weight"] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(record))


def lose_a_tensor(folder: Path) -> None:
    record = json.loads((folder / INDEX).read_text())
    del record["weight_map"]["head.weight"]
    (folder / INDEX).write_text(json.dumps(record))


def lose_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def lose_settings(folder: Path) -> None:
    (folder / "config.json").unlink()


def take_a_shard_of_another_model(folder: Path) -> None:
    file = shards(folder)[0]
    other = {name: tensor[:1].clone() for name, tensor in load_file(file).items()}
    save_file(other, file)


DAMAGE = {
    lose_a_shard: f"{INDEX} names model-00002-of-",
    cut_a_shard: "cannot be read (",
    name_a_missing_tensor: f"lacks blocks.9.W_q.weight, which {INDEX} expects in it: copy the",
    lose_a_tensor: 'Missing key(s) in state_dict: "model.head.weight"',
    lose_index: "holds a part of an exported model and no model.safetensors and no model.safe",
    lose_settings: "holds a part of an exported model and no config.json: remove the folder",
    take_a_shard_of_another_model: "its settings have vocab_size=",
}
"""A change of the folder, and a part of the error."""


@pytest.mark.parametrize("spoil", DAMAGE)
def test_a_damaged_folder_is_refused(
    spoil: Callable[[Path], None], exported: Path, refusal
) -> None:
    spoil(exported)

    assert DAMAGE[spoil] in refusal("generate", exported, "the")


def kill_at_rename(number: int, arguments: list[str]) -> int:
    """Run anlit in a process that dies before its `number`-th rename; returns its exit status."""
    child = os.fork()
    if child == 0:
        rename = os.replace
        n_renames = 0

        def rename_or_die(*paths: Any) -> None:
            nonlocal n_renames
            if n_renames == number:
                os._exit(9)
            n_renames += 1
            rename(*paths)

        os.replace = rename_or_die  # type: ignore[assignment]
        os._exit(main(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("form", ["safetensors", "huggingface"])
def test_a_kill_leaves_no_folder_that_is_read(form: str, tmp_path: Path, refusal) -> None:
    run = make_run_with_text(tmp_path, NGPT)
    complete = export(run, tmp_path / "complete", f"--format={form}", MANY)
    files = {path.name for path in complete.iterdir()}
    out = tmp_path / "out"
    arguments = ["export", str(run), f"--output={out}", f"--format={form}", MANY]
    number = 0
    while kill_at_rename(number, arguments) == 9:
        assert not (out / "config.json").exists()
        assert {path.name for path in out.glob("[!.]*")} < files
        if any(out.glob("*.safetensors")):
            sentence = "holds a part of an exported model and no config.json"
            assert sentence in refusal("generate", out, "the")
        out = tmp_path / f"out{number}"
        arguments[2] = f"--output={out}"
        number += 1

    assert number >= len(files)
    assert {path.name for path in out.iterdir()} == files


def test_a_shard_is_released_before_the_next_is_converted(tmp_path: Path, monkeypatch) -> None:
    weights = {f"w{number}": torch.randn(50, 50) for number in range(6)}
    held: list[weakref.ref[torch.Tensor]] = []
    n_written = []

    def save_and_remember(tensors: dict[str, torch.Tensor], *arguments: Any, **options: Any) -> Any:
        n_alive = sum(reference() is not None for reference in held)
        n_written.append(len(tensors) + n_alive)
        held.extend(weakref.ref(tensor) for tensor in tensors.values())
        return save_file(tensors, *arguments, **options)

    monkeypatch.setattr(weight_files, "save_file", save_and_remember)

    write_weights(tmp_path, weights, WeightFormat(torch.bfloat16, "10KB"))

    assert n_written == [2, 2, 2]


MEASURE = """
import re, sys, threading
from pathlib import Path
from anlit.hub.import_model import import_model

def own_memory():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) * 1024

def watch():
    global largest
    while not done.wait(0.001):
        largest = max(largest, own_memory())

small, large, output = sys.argv[1:]
import_model(small, output + "/small")
before = largest = own_memory()
done = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
import_model(large, output + "/large", max_shard_size="20MB")
done.set()
watcher.join()
print(largest - before)
"""
"""Imports a small model, then a large model, and prints the memory that the large one takes."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_import_holds_a_shard_at_a_time(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2}
    published("Qwen3-0.6B", tmp_path / "small")
    model = published("Qwen3-0.6B", tmp_path / "large", **large)
    n_bytes = sum(weight.nbytes for weight in model.parameters())

    folders = [tmp_path / name for name in ("small", "large", "output")]
    command = [sys.executable, "-c", MEASURE, *map(str, folders)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert n_bytes > 5 * 20e6
    assert int(printed) < 0.5 * n_bytes


def test_an_import_is_written_in_shards(tmp_path: Path) -> None:
    model = published("Llama-3.2-1B", tmp_path / "llama")

    imported = import_model(tmp_path / "llama", tmp_path / "out", "--max_shard_size=20KB")

    assert len(shards(imported)) > 2
    logits = load_checkpoint(str(imported), "cpu").model(PROMPT)
    torch.testing.assert_close(logits, model(PROMPT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["5", "GB", "0MB", "-1GB", "5XB", "5GB 3"])
def test_a_size_without_number_or_unit_is_refused(text: str, refusal) -> None:
    message = refusal("export", "run", "--output=out", f"--max_shard_size={text}")

    assert f"--max_shard_size {text} must be a size such as 500MB or 50GB" in message


@pytest.mark.parametrize("text", ["5GB", "1.5 mb", "200KB"])
def test_a_size_is_what_the_library_reads(text: str, tmp_path: Path) -> None:
    write_weights(tmp_path, {"a": torch.ones(2)}, WeightFormat(torch.float32, file_size(text)))

    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("size", ["2KB", "1GB"])
def test_a_matrix_of_several_layers_is_written_under_all_its_names(
    size: str, tmp_path: Path
) -> None:
    shared = torch.randn(10, 20)
    weights = {"blocks.0.W": shared, "blocks.1.W": shared, "blocks.2.W": shared}

    write_weights(tmp_path, weights, WeightFormat(torch.float32, size))

    torch.testing.assert_close(read_weights(tmp_path, ""), weights, rtol=0, atol=0)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2000), "b": torch.full((2000,), torch.nan)}

    with pytest.raises(UserError, match="the model holds weights that are NaN or infinite"):
        write_weights(tmp_path, weights, WeightFormat(torch.float32, "8KB"))


def test_shards_are_as_large_as_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    parameters = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters

    assert parameters["max_shard_size"].default == MAX_SHARD_SIZE

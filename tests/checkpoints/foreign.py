"""A run of the command line, and its model in every form of a checkpoint, with foreign settings."""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from anlit.checkpoints.integrity import SUMS, checksum
from anlit.checkpoints.location import META
from anlit.checkpoints.sharded import STATES, without_tensors
from anlit.cli import main
from anlit.data.tokenizer import train_bpe
from anlit.errors import UserError
from anlit.training.load_model import load_checkpoint
from tests.data.prepared import VOCABULARY
from tests.data.reader import edit
from tests.evaluation.saved import TEXTS, prepare

Settings = dict[str, Any]


class RunsCode:
    """Unpickling an object of this class makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def trained(folder: Path, architecture: str, *options: str, document_token_at: str = "end") -> Path:
    """FOLDER/run, made by `anlit fit` on FOLDER/data, which has a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    train_bpe(TEXTS, VOCABULARY - 10).save(str(tokenizer))
    data = prepare(
        folder / "data",
        tokenizer_sha256=sha256(tokenizer.read_bytes()).hexdigest(),
        document_token_at=document_token_at,
    )
    shutil.copy(tokenizer, data / "tokenizer.json")
    run = folder / "run"
    arguments = [
        "fit",
        f"--model={architecture}",
        f"--model.vocab_size={VOCABULARY}",
        "--model.context_length=16",
        "--model.n_layers=1",
        "--model.n_heads=2",
        "--model.d_model=16",
        "--data=TokenShards",
        f"--data.path={data}",
        "--data.batch_size=2",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false",
        f"--run_dir={run}",
        *options,
    ]
    assert main(arguments) == 0
    return run


def refused(path: object, **settings: Any) -> str:
    """The message of the error when the path is loaded. It is a single sentence."""
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_checkpoint(str(path), **settings)
    return str(error.value)


def content_of(run: Path, settings: Settings | None = None) -> dict[str, Any]:
    """The content of the run's checkpoint with changed settings of the model."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["hyper_parameters"] |= settings or {}
    return content


def as_file(run: Path, folder: Path, settings: Settings) -> Path:
    torch.save(content_of(run, settings), folder / "a.ckpt")
    return folder / "a.ckpt"


def write_shard(content: dict[str, Any], folder: Path) -> Path:
    """Write a checkpoint's content as a single rank does: a folder with one shard."""
    tensors: dict[str, torch.Tensor] = {}
    entries = {key: content[key] for key in STATES if key in content}
    states = without_tensors(entries, tensors)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    torch.save({**content, **states}, folder / META)
    return write_checksums(folder)


def write_checksums(folder: Path) -> Path:
    """Write sums.json again, as the author of a foreign folder can."""
    checksums = {}
    for shard in folder.glob("*.safetensors"):
        if shard.is_file():
            checksums[shard.name] = checksum(shard)
    (folder / SUMS).write_text(json.dumps(checksums))
    return folder


def as_shards(run: Path, folder: Path, settings: Settings) -> Path:
    return write_shard(content_of(run, settings), folder / "shards")


def as_export(run: Path, folder: Path, settings: Settings, *options: str) -> Path:
    assert main(["export", str(run), "--output", str(folder / "exported"), *options]) == 0
    edit(folder / "exported" / "config.json", lambda record: record["settings"].update(settings))
    return folder / "exported"


def as_run(run: Path, folder: Path, settings: Settings) -> Path:
    """A copy of the run folder, with the settings in its checkpoints and config.yaml."""
    copy = shutil.copytree(run, folder / "run")
    for name in ("best", "last"):
        torch.save(content_of(run, settings), copy / "checkpoints" / f"{name}.ckpt")
    change_config(copy, lambda config: config["model"]["init_args"].update(settings))
    return copy


FORMS: dict[str, Callable[[Path, Path, Settings], Path]] = {
    "file": as_file,
    "shards": as_shards,
    "export": as_export,
    "run": as_run,
}
"""The forms of a checkpoint: functions of a run, a folder for the checkpoint, and settings."""


def change_config(run: Path, change: Callable[[Any], Any]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))

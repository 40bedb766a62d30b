"""A run trained by the command line, and the same model in every form of a checkpoint, with settings of a stranger."""

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
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def trained(folder: Path, architecture: str, *more: str, document_token_at: str = "end") -> Path:
    """FOLDER/run, made by `anlit fit` on FOLDER/data, which has a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    train_bpe(TEXTS, VOCABULARY - 10).save(str(tokenizer))
    sha = sha256(tokenizer.read_bytes()).hexdigest()
    data = prepare(folder / "data", tokenizer_sha256=sha, document_token_at=document_token_at)
    shutil.copy(tokenizer, data / "tokenizer.json")
    run = folder / "run"
    arguments = [
        "fit", f"--model={architecture}", f"--model.vocab_size={VOCABULARY}", "--model.context_length=16",
        "--model.n_layers=1", "--model.n_heads=2", "--model.d_model=16", "--data=TokenShards", f"--data.path={data}",
        "--data.batch_size=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.val_check_interval=2",
        "--trainer.enable_progress_bar=false", f"--run_dir={run}", *more,
    ]  # fmt: skip
    assert main(arguments) == 0
    return run


def refused(path: object, **settings: Any) -> str:
    """The one sentence by which the path is not loaded."""
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        load_checkpoint(str(path), **settings)
    return str(error.value)


def content_of(run: Path, settings: Settings | None = None) -> dict[str, Any]:
    """The run's checkpoint with other settings of the model."""
    content = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    content["hyper_parameters"] |= settings or {}
    return content


def as_file(run: Path, folder: Path, settings: Settings) -> Path:
    torch.save(content_of(run, settings), folder / "a.ckpt")
    return folder / "a.ckpt"


def write_parts(content: dict[str, Any], folder: Path) -> Path:
    """A checkpoint's content as a single rank writes it into its part."""
    tensors: dict[str, torch.Tensor] = {}
    states = without_tensors({key: content[key] for key in STATES}, tensors)
    dcp.save(
        tensors,
        storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        no_dist=True,
    )
    torch.save({**content, **states}, folder / META)
    return with_sums(folder)


def with_sums(folder: Path) -> Path:
    """Write sums.json again: whoever makes a folder can make that too."""
    sums = {part.name: checksum(part) for part in folder.glob("*.safetensors") if part.is_file()}
    (folder / SUMS).write_text(json.dumps(sums))
    return folder


def as_export(run: Path, folder: Path, settings: Settings, *options: str) -> Path:
    assert main(["export", str(run), "--output", str(folder / "exported"), *options]) == 0
    edit(folder / "exported" / "config.json", lambda record: record["settings"].update(settings))
    return folder / "exported"


def as_run(run: Path, folder: Path, settings: Settings) -> Path:
    """A run folder whose checkpoints and config.yaml have the settings."""
    copy = shutil.copytree(run, folder / "run")
    for name in ("best", "last"):
        torch.save(content_of(run, settings), copy / "checkpoints" / f"{name}.ckpt")
    change_config(copy, lambda config: config["model"]["init_args"].update(settings))
    return copy


FORMS: dict[str, Callable[[Path, Path, Settings], Path]] = {
    "file": as_file,
    "shards": lambda run, folder, settings: write_parts(
        content_of(run, settings), folder / "shards"
    ),
    "export": as_export,
    "folded": lambda run, folder, settings: as_export(run, folder, settings, "--fold"),
    "run": as_run,
}


def change_config(run: Path, change: Callable[[Any], Any]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))

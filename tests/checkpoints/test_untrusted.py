"""A checkpoint whose pickle would run code is refused before it does, in every form of checkpoint."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from anlit import GPT
from anlit.checkpoints.checkpoint_io import REST, read_checkpoint, read_rest
from anlit.checkpoints.initial_weights import load_initial_weights
from anlit.checkpoints.integrity import write_sums
from anlit.checkpoints.loading import load_checkpoint
from anlit.checkpoints.untrusted import METADATA
from anlit.cli import main
from anlit.errors import UserError
from tests.checkpoints.foreign import RunsCode
from tests.models.tiny import fit, tiny


def refused(path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt in (lambda: load_checkpoint(str(path)), lambda: load_initial_weights(tiny(GPT), str(path))):
        with pytest.raises(UserError, match="cannot be read as a checkpoint") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert main(["export", str(path), "--output", str(path.parent / "exported")]) == 2
    assert "cannot be read as a checkpoint" in capsys.readouterr().err
    assert not trace.exists(), "its code was run"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model, file = fit(tiny(GPT), max_steps=1), tmp_path_factory.mktemp("whole") / "a.ckpt"
    model.trainer.save_checkpoint(file)
    return torch.load(file, weights_only=True)


def sharded(folder: Path, content: dict[str, Any], **more: Any) -> Path:
    """The same content as ranks write it."""
    rest = {key: value for key, value in content.items() if key not in ("state_dict", "optimizer_states")}
    dcp.save({"state_dict": content["state_dict"], **more}, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / REST)
    write_sums(folder)
    return folder


def test_one_file(content, tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace"
    torch.save({**content, "extra": RunsCode(trace)}, tmp_path / "a.ckpt")
    refused(tmp_path / "a.ckpt", trace, capsys)
    (tmp_path / "b.ckpt").write_bytes(pickle.dumps(RunsCode(trace)))
    refused(tmp_path / "b.ckpt", trace, capsys)


def test_every_part_of_a_sharded_one(content, tmp_path: Path, capsys) -> None:
    trace = tmp_path / "trace"
    whole = sharded(tmp_path / "whole", content, optimizer_0={"param_groups": [{"lr": 0.1, "params": ["a"]}]})
    read = read_checkpoint(whole)
    assert all(torch.equal(read["state_dict"][name], tensor) for name, tensor in content["state_dict"].items())
    assert read["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]

    entry = sharded(tmp_path / "entry", content, extra=RunsCode(trace))
    refused(entry, trace, capsys)
    with pytest.raises(pickle.UnpicklingError):  # what a sharded run reads first, to go on from it
        read_rest(entry)
    rest = sharded(tmp_path / "rest", {**content, "extra": RunsCode(trace)})
    refused(rest, trace, capsys)
    for number, evil in enumerate((pickle.dumps(RunsCode(trace)), b"cbuiltins\neval\n(S'1'\ntR.", b"")):
        metadata = sharded(tmp_path / f"metadata{number}", content)
        (metadata / METADATA).write_bytes(evil)
        write_sums(metadata)  # whoever makes it can make those too
        refused(metadata, trace, capsys)

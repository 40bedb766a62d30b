"""An exported model is the checkpoint's model, wherever its folder goes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anlit import GPT, NGPT, AnGPT
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import make_run, prepare
from tests.models.tiny import random_tokens

TOKENS = random_tokens(2, 12, vocab_size=VOCABULARY)


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_an_exported_model_gives_the_same_logits(architecture, tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), architecture)
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert "config.json, model.safetensors" in capsys.readouterr().out
    moved = shutil.move(tmp_path / "out", tmp_path / "elsewhere")
    original = load_checkpoint(str(run), "cpu")
    shutil.rmtree(run)
    loaded = load_checkpoint(str(moved), "cpu")
    assert torch.equal(loaded.model(TOKENS), original.model(TOKENS))
    assert (loaded.step, loaded.label) == (original.step, original.label)
    assert loaded.trained_on == original.trained_on


def test_the_file_holds_the_decoder_by_its_own_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", prepare(tmp_path / "data"), AnGPT)
    main(["export", str(run), "--output", str(tmp_path / "out")])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    decoder = load_checkpoint(str(run), "cpu").model.model
    assert weights.keys() == decoder.state_dict().keys()
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    record = json.loads((tmp_path / "out" / "config.json").read_text())
    assert record["architecture"] == "AnGPT"
    assert record["settings"]["attention"]["class_path"].endswith("ScaleInvariant")

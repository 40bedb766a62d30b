"""Runs with shared keys and heads of another width, from the command line to what is done with a trained model."""

import json
from pathlib import Path

import pytest
import torch

from anlit import load_checkpoint
from anlit.cli import main
from tests.integration.conftest import Train
from tests.models.tiny import random_tokens

HEADS = ("--model.n_heads=4", "--model.n_kv_heads=2", "--model.d_head=12", "--trainer.max_steps=4")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("AnGPT", ()),
        pytest.param("NGPT", ("--model.attention=ScaleInvariant",), marks=slow),
        pytest.param("GPT", ("--model.tie_embeddings=true",), marks=slow),
    ],
)
def test_a_run_with_shared_keys(trained: Train, tmp_path: Path, capsys, model: str, extra: tuple[str, ...]) -> None:
    run = str(trained(*HEADS, *extra, model=model))
    block = load_checkpoint(run, "cpu").model.model.blocks[0]
    assert (block.W_q.weight.shape, block.W_k.weight.shape) == ((48, 32), (24, 32))

    assert main(["generate", run, "import json", "--max_tokens", "20", "--temperature", "0", "--json"]) == 0
    (record,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert len(record["log_likelihood"]) == len(record["tokens"]) <= 20

    def logits(path: str) -> torch.Tensor:
        with torch.no_grad():
            return load_checkpoint(path, "cpu").model(random_tokens(2, 16))

    exported, folded = str(tmp_path / "exported"), str(tmp_path / "folded")
    assert main(["export", run, "--output", exported]) == 0
    assert torch.equal(logits(exported), logits(run))
    if model != "GPT":
        assert main(["export", run, "--output", folded, "--fold"]) == 0
        torch.testing.assert_close(logits(folded), logits(run), rtol=1e-4, atol=1e-4)

    out = tmp_path / "lengths"
    assert main(["lengths", run, f"--output={out}", "--lengths=32,64", "--tokens=512"]) == 0
    losses = [loss["mean"] for loss in json.loads((out / "lengths.json").read_text())["arms"][0]["loss"]]
    assert losses
    assert all(2 < loss < 7 for loss in losses)

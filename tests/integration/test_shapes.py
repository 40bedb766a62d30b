"""Runs with shared keys and heads of another width, from the command line to what is done with a trained model."""

import json
from pathlib import Path

import pytest
import torch

from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from tests.integration.conftest import fit_arguments
from tests.models.tiny import random_tokens

HEADS = ("--model.n_heads=4", "--model.n_kv_heads=2", "--model.d_head=12")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("AnGPT", ()),
        pytest.param("NGPT", ("--model.attention=ScaleInvariant",), marks=slow),
        pytest.param("GPT", ("--model.tie_embeddings=true",), marks=slow),
    ],
)
def test_a_run_with_shared_keys(shards: Path, tmp_path: Path, capsys, model: str, extra: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    arguments = fit_arguments(shards, run, *HEADS, *extra, "--trainer.max_steps=4", model=model)
    assert main(arguments) == 0
    loaded = load_checkpoint(str(run), "cpu")
    block = loaded.model.model.blocks[0]
    assert (block.W_q.weight.shape, block.W_k.weight.shape) == ((48, 32), (24, 32))

    capsys.readouterr()
    assert main(["generate", str(run), "import json", "--max_tokens", "20", "--temperature", "0", "--json"]) == 0
    (record,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert len(record["log_likelihood"]) == len(record["tokens"]) <= 20

    assert main(["export", str(run), "--output", str(tmp_path / "exported")]) == 0
    tokens = random_tokens(2, 16)
    with torch.no_grad():
        expected = loaded.model(tokens)
        assert torch.equal(load_checkpoint(str(tmp_path / "exported"), "cpu").model(tokens), expected)
        if model != "GPT":
            assert main(["export", str(run), "--output", str(tmp_path / "folded"), "--fold"]) == 0
            folded = load_checkpoint(str(tmp_path / "folded"), "cpu").model(tokens)
            torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-4)

    out = tmp_path / "lengths"
    assert main(["lengths", str(run), f"--output={out}", "--lengths=32,64", "--tokens=512"]) == 0
    losses = [one["mean"] for one in json.loads((out / "lengths.json").read_text())["arms"][0]["loss"]]
    assert losses
    assert all(2 < loss < 7 for loss in losses)

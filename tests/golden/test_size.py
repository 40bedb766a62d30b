"""`anlit size --json` of shipped configurations against stored numbers: every key, every byte to 1 %.

Where torch keeps other tensors for the backward pass the bytes may move; then they are written anew:

    python -m tests.golden.test_size
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from anlit.commands.size import main

RECORD = Path(__file__).with_name("size.json")
SMALL = [
    *("--model.vocab_size", "1024", "--model.n_layers", "6", "--model.d_model", "128", "--model.n_heads", "4"),
    *("--model.context_length", "256", "--data", "TokenShards", "--data.path", "nowhere", "--data.batch_size", "4"),
]
CASES = {
    "gpt": ["--model", "GPT", *SMALL],
    "ngpt-ddp-accumulated": [
        *("--model", "NGPT", *SMALL, "--gpus", "4", "--strategy", "ddp"),
        *("--trainer.accumulate_grad_batches", "2", "--tokens", "1e9"),
    ],
    "angpt-fsdp-recomputed": [
        *("--model", "AnGPT", *SMALL, "--gpus", "8", "--strategy", "fsdp", "--trainer.precision", "bf16-mixed"),
        *("--model.runtime.recompute_every", "2", "--gpu", "A100"),
    ],
    "angpt-scale-invariant-grouped": [
        *("--model", "AnGPT", *SMALL, "--model.attention", "ScaleInvariant", "--model.n_kv_heads", "2"),
        *("--trainer.precision", "bf16-true"),
    ],
}


def size(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "size.json"
    assert main([*CASES[name], "--json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_those_of_the_record(name: str, tmp_path: Path) -> None:
    expected, result = json.loads(RECORD.read_text())[name], size(name, tmp_path)
    for key in ("memory", "peak", "allowance"):
        assert result.pop(key) == pytest.approx(expected.pop(key), rel=0.01), key
    assert result == expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        RECORD.write_text(json.dumps({name: size(name, Path(scratch)) for name in CASES}, indent=1) + "\n")

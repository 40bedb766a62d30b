"""llama.cpp reads an exported GPT+ and decodes what `anlit generate` does.

It needs the package llama-cpp-python, and in LLAMA_CPP the folder of llama.cpp's sources, whose script converts models.
"""

import json
import os
import subprocess
import sys
from itertools import islice, takewhile
from pathlib import Path

import pytest

from anlit import GPT, Llama3RoPE, Plain, RoPE, YaRN
from anlit.cli import main
from tests.data.prepared import END
from tests.docs.pages import ROOT, files
from tests.evaluation.saved import make_run_with_text

llama_cpp = pytest.importorskip("llama_cpp")
SOURCES = os.environ.get("LLAMA_CPP", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SOURCES, reason="LLAMA_CPP names no folder")]

PROMPTS, N_NEW = ("the cat", "and the dog sat"), 40
SIZE = {"n_layers": 3, "n_heads": 4, "d_model": 64, "d_ff": 160, "context_length": 128}


QWEN3 = {"positions": RoPE(1.0), "n_kv_heads": 2, "d_head": 24, "tie_embeddings": True}
YARN = {"positions": YaRN(4.0, 32, fraction=1.0), "n_kv_heads": 1}
LLAMA = {
    "positions": Llama3RoPE(8.0, 32, fraction=1.0, base=5e5),
    "n_kv_heads": 2,
    "qk_norm": False,
}


@pytest.mark.parametrize("settings", [QWEN3, YARN, LLAMA], ids=["Qwen3", "YaRN", "Llama"])
def test_the_same_tokens(settings, tmp_path: Path, capsys) -> None:
    """The vocabulary is that of the small tokenizer, because anlit leaves out tokens that no text has."""
    run = make_run_with_text(
        tmp_path, GPT, attention=Plain(), init_std=0.2, vocab_size=296, **SIZE, **settings
    )
    assert (
        main(["export", str(run), "--format", "huggingface", "--output", str(tmp_path / "out")])
        == 0
    )
    capsys.readouterr()
    assert (
        main(["generate", str(run), *PROMPTS, f"--max_tokens={N_NEW}", "--temperature=0", "--json"])
        == 0
    )
    expected_records = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]

    (tmp_path / "to_gguf.py").write_text(
        dict(files(ROOT / "docs" / "after-training.md"))["to_gguf.py"]
    )
    path = os.pathsep.join([SOURCES, f"{SOURCES}/gguf-py", os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "to_gguf.py", "out", "--outtype", "f32", "--outfile", "model.gguf"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    float32 = {
        "type_k": llama_cpp.GGML_TYPE_F32,
        "type_v": llama_cpp.GGML_TYPE_F32,
    }  # half precision may break ties
    llama = llama_cpp.Llama(
        str(tmp_path / "model.gguf"), n_ctx=256, n_threads=1, verbose=False, **float32
    )
    for text, record in zip(PROMPTS, expected_records, strict=True):
        prompt = llama.tokenize(text.encode(), add_bos=False)
        assert prompt == record["prompt_tokens"]
        llama.reset()
        generated = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        tokens = list(takewhile(lambda token: token != END, islice(generated, N_NEW)))
        assert len(tokens) > 5
        assert tokens == record["tokens"]

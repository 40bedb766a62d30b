"""llama.cpp reads an exported GPT+ and decodes the tokens of `anlit generate`.

It needs the packages llama-cpp-python and sentencepiece, and in LLAMA_CPP the folder of llama.cpp's
sources. Their script converts models.
"""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from anlit import GPT, Llama3RoPE, Plain, RoPE, YaRN, load_checkpoint
from tests.data.prepared import END
from tests.docs.pages import ROOT, files
from tests.evaluation.saved import make_run_with_text
from tests.evaluation.test_generate_command import generate_records
from tests.hub.models import export_to_transformers

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("sentencepiece", reason="llama.cpp's script imports it")
SOURCES = os.environ.get("LLAMA_CPP", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SOURCES, reason="LLAMA_CPP names no folder")]

PROMPTS = ("the cat", "and the dog sat")
TEXTS = (
    "the cat sat on the mat\n\n\n  and\t\tthe dog",
    "naïve café – ☕ e\u0301 日本語 \u00a0don't 1,234.5 we'll",
    "a\r\nb  trailing   ",
    "<|endoftext|> is a text",
)
"""Texts whose tokens and logits are compared."""
N_NEW = 40
SIZE = {
    "n_layers": 3,
    "n_heads": 4,
    "d_model": 64,
    "d_ff": 160,
    "context_length": 128,
    "vocab_size": 296,
}
"""The vocabulary of the small tokenizer: anlit leaves out tokens without a text."""
QWEN3 = {
    "positions": RoPE(1.0),
    "n_kv_heads": 2,
    "d_head": 24,
    "tie_embeddings": True,
}
YARN = {"positions": YaRN(4.0, 32, fraction=1.0), "n_kv_heads": 1}
LLAMA = {
    "positions": Llama3RoPE(8.0, 32, fraction=1.0, base=5e5),
    "n_kv_heads": 2,
    "qk_norm": False,
}


MODELS = {"Qwen3": QWEN3, "YaRN": YARN, "Llama": LLAMA}


def convert(folder: Path) -> Path:
    """Convert FOLDER/out with the script of the page; returns the file."""
    page = ROOT / "docs" / "after-training.md"
    script = dict(files(page))["to_gguf.py"]
    (folder / "to_gguf.py").write_text(script)
    paths = [SOURCES, f"{SOURCES}/gguf-py", os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "to_gguf.py", "out"]
    options = ["--outtype", "f32", "--outfile", "model.gguf"]
    subprocess.run([*command, *options], cwd=folder, env=environment, check=True)
    return folder / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(name: str, tmp_path: Path, capsys) -> None:
    settings = {**SIZE, **MODELS[name]}
    run = make_run_with_text(tmp_path, GPT, attention=Plain(), init_std=0.2, **settings)
    greedy = [f"--max_tokens={N_NEW}", "--temperature=0"]

    export_to_transformers(run, tmp_path / "out")
    records = generate_records(capsys, run, *PROMPTS, *greedy)
    llama = llama_cpp.Llama(
        str(convert(tmp_path)),
        n_ctx=256,
        n_threads=1,
        verbose=False,
        logits_all=True,
        # Half precision may break ties.
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )

    for text, record in zip(PROMPTS, records, strict=True):
        prompt = llama.tokenize(text.encode(), add_bos=False)
        llama.reset()
        generated = llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        tokens = []
        for token in islice(generated, N_NEW):
            if token == END:
                break
            tokens.append(token)
        assert prompt == record["prompt_tokens"]
        assert len(tokens) > 5
        assert tokens == record["tokens"]

    model = load_checkpoint(str(run), "cpu")
    for text in TEXTS:
        tokens = model.tokenizer.encode(text)
        assert llama.tokenize(text.encode(), add_bos=False) == tokens
        llama.reset()
        llama.eval(tokens)
        expected = model.model(torch.tensor([tokens]))[0]
        logits = torch.from_numpy(llama.scores[: len(tokens)])
        assert expected.std() > 0.5
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

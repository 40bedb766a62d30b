"""The lm-evaluation-harness gives exported models the log-likelihoods of `anlit score`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anlit
from anlit import GPT, NGPT, AnGPT, RoPE
from anlit.data.tokenizer import load_tokenizer
from tests.docs.pages import ROOT, files
from tests.evaluation.saved import make_run_with_text
from tests.hub.models import export_to_transformers

lm_eval = pytest.importorskip("lm_eval", reason="anlit[eval] is not installed")
pytestmark = pytest.mark.usefixtures("own_code_cache")

N_TOKENS = 296
"""The vocabulary of the small tokenizer. So the model has no token without a text."""
SETTINGS: dict[Any, dict[str, Any]] = {
    GPT: {"positions": RoPE(1.0), "attention": anlit.Plain(), "init_std": 0.2},
    NGPT: {"s_z_init": 8.0},
    AnGPT: {"s_z_init": 8.0},
}
RECORDS = [
    {"context": "the cat sat on the", "choices": [" mat", " dog by the cat"], "answer": 0},
    {"context": "naïve", "choices": [" café – ☕ for", " dogs"], "answer": 1},
    {"context": "the dogs and the", "choices": [" cats", " mat and"], "answer": 0},
]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the page's task, in the working directory with its records."""
    monkeypatch.chdir(tmp_path)
    page = dict(files(ROOT / "docs" / "after-training.md"))
    Path("continuations.yaml").write_text(page["continuations.yaml"])
    lines = [json.dumps(record) for record in RECORDS]
    Path("continuations.jsonl").write_text("\n".join(lines))
    return "continuations"


def scored(run: Path, context: str, choice: str) -> float:
    """The log-likelihood of a choice by `anlit score`."""
    model = anlit.load_checkpoint(str(run), "cpu")
    n_context = len(model.tokenizer.encode(context))
    return float(np.sum(model.score(context + choice).log_likelihood[n_context:]))


@pytest.mark.parametrize("architecture", SETTINGS)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_log_likelihoods_are_those_of_score(
    architecture: Any, batch_size: int, task: str, tmp_path: Path
) -> None:
    from lm_eval.models.huggingface import HFLM

    settings = {**SETTINGS[architecture], "vocab_size": N_TOKENS, "context_length": 64}
    run = make_run_with_text(tmp_path, architecture, **settings)
    out = export_to_transformers(run, tmp_path / "out")
    assert load_tokenizer(out / "tokenizer.json").get_vocab_size() == N_TOKENS

    results = lm_eval.simple_evaluate(
        model=HFLM(str(out), trust_remote_code=True, device="cpu", batch_size=batch_size),
        tasks=[task],
        task_manager=lm_eval.tasks.TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=0,
    )

    samples = results["samples"][task]
    assert len(samples) == len(RECORDS)
    n_right = 0
    for sample in samples:
        record = sample["doc"]
        expected = [scored(run, record["context"], choice) for choice in record["choices"]]
        log_likelihoods = [float(response[0][0]) for response in sample["resps"]]
        np.testing.assert_allclose(log_likelihoods, expected, rtol=1e-5, atol=1e-4)
        assert abs(expected[0] - expected[1]) > 0.1
        n_right += int(np.argmax(expected)) == record["answer"]
    assert results["results"][task]["acc,none"] == pytest.approx(n_right / len(RECORDS))

"""The lm-evaluation-harness on an exported model: its accuracy is that of a direct count with the model's logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from anlit import AnGPT, SqrtLogN
from anlit.checkpoints.loading import load_checkpoint
from anlit.cli import main
from anlit.data.tokenizer import load_tokenizer
from tests.inference.with_text import make_run_with_text

lm_eval = pytest.importorskip("lm_eval", reason="needs `make extras EXTRAS=eval`")
pytestmark = pytest.mark.slow

WORDS = ["the cat", "the dog", "a mat", "the cats and the dogs", "on the mat", "sat", "naïve café – ☕", "by"]
N_QUESTIONS = 40


def write_task(folder: Path) -> list[dict[str, Any]]:
    """A multiple-choice task whose data lie beside it; returns its questions."""
    rng = np.random.default_rng(0)
    rows = [
        {"text": " ".join(rng.choice(WORDS, int(rng.integers(1, 12)))), "answer": int(rng.integers(4)),
         "choices": rng.choice(WORDS, 4, replace=False).tolist()}
        for _ in range(N_QUESTIONS)
    ]  # fmt: skip
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(folder / "questions.jsonl")}, "cache_dir": str(folder / "cache")}
    task = {
        "task": "cats_and_dogs", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (folder / "cats_and_dogs.yaml").write_text(yaml.safe_dump(task))
    return rows


@torch.no_grad()
def counted(run: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Accuracies by whole sequences, one at a time."""
    model, tokenizer = load_checkpoint(str(run), "cpu").model, load_tokenizer(run.parent / "data" / "tokenizer.json")
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        n_context, sums = len(tokenizer.encode(row["text"]).ids), []
        for choice in row["choices"]:
            ids = tokenizer.encode(f"{row['text']} {choice}").ids
            chances = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            sums.append(sum(chances[k - 1, ids[k]].item() for k in range(n_context, len(ids))))
        right["acc"] += int(np.argmax(sums)) == row["answer"]
        right["acc_norm"] += int(np.argmax(np.divide(sums, [*map(len, row["choices"])]))) == row["answer"]
    return {f"{name},none": number / N_QUESTIONS for name, number in right.items()}


@pytest.mark.usefixtures("own_code_cache")
def test_accuracy_of_an_exported_model_is_that_of_a_direct_count(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    settings = {"attention": SqrtLogN(), "s_z_init": 8.0, "context_length": 64}
    run, out = make_run_with_text(tmp_path, AnGPT, **settings), tmp_path / "out"
    assert main(["export", str(run), "--format", "huggingface", "--output", str(out)]) == 0
    expected = counted(run, write_task(tmp_path))
    assert 0.05 < expected["acc,none"] < 0.6
    assert expected["acc,none"] != expected["acc_norm,none"]
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    model = f"pretrained={out},trust_remote_code=True,dtype=float32"
    measured = lm_eval.simple_evaluate(
        "hf", model_args=model, tasks=["cats_and_dogs"], task_manager=manager, device="cpu", batch_size=4,
        bootstrap_iters=0,
    )["results"]["cats_and_dogs"]  # fmt: skip
    assert {name: measured[name] for name in expected} == expected

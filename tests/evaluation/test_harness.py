"""`anlit evaluate` on a task made here: lm_eval's accuracy is that of a direct count with the model's logits."""

import json
import sys
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
from anlit.inference.text import text_of
from tests.inference.with_text import make_run_with_text

WORDS = ["the cat", "the dog", "a mat", "the cats and the dogs", "on the mat", "sat", "naïve café – ☕", "by"]
N_QUESTIONS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return make_run_with_text(folder, AnGPT, attention=SqrtLogN(), s_z_init=8.0, context_length=64)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice task; its data lie beside it."""
    folder, rng = tmp_path_factory.mktemp("tasks"), np.random.default_rng(0)
    rows = []
    for _ in range(N_QUESTIONS):
        choices = rng.choice(WORDS, 4, replace=False).tolist()
        text = " ".join(rng.choice(WORDS, int(rng.integers(1, 12))))
        rows.append({"text": text, "choices": choices, "answer": int(rng.integers(4))})
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "cats_and_dogs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (folder / "cats_and_dogs.yaml").write_text(yaml.safe_dump(task))
    return folder


@torch.no_grad()
def counted(run: Path, folder: Path) -> dict[str, float]:
    """Accuracies by whole sequences, one at a time."""
    checkpoint = load_checkpoint(str(run), "cpu")
    tokenizer = load_tokenizer(run.parent / "data" / "tokenizer.json")
    right = {"acc": 0, "acc_norm": 0}
    for line in (folder / "questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        n_context = len(tokenizer.encode(row["text"]).ids)
        sums = []
        for choice in row["choices"]:
            ids = tokenizer.encode(f"{row['text']} {choice}").ids[-65:]
            logits = checkpoint.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            n = len(tokenizer.encode(f"{row['text']} {choice}").ids) - n_context
            sums.append(sum(logits[-n + k, ids[-n + k]].item() for k in range(n)))
        right["acc"] += int(np.argmax(sums)) == row["answer"]
        per_byte = [one / len(choice) for one, choice in zip(sums, row["choices"], strict=True)]
        right["acc_norm"] += int(np.argmax(per_byte)) == row["answer"]
    return {name: number / N_QUESTIONS for name, number in right.items()}


def evaluated(run: Path, folder: Path, output: Path, *options: str) -> dict[str, Any]:
    arguments = ["--tasks", "cats_and_dogs", "--include_path", str(folder), "--output", str(output), "--device", "cpu"]
    assert main(["evaluate", str(run), *arguments, *options]) == 0
    return json.loads((output / "evaluate.json").read_text())


def test_accuracy_is_that_of_a_direct_count_whatever_the_batch(run: Path, questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs `make extras EXTRAS=eval`")
    expected = counted(run, questions)
    assert 0.05 < expected["acc"] < 0.6
    assert expected["acc"] != expected["acc_norm"]
    found = []
    for size in (1, 64):
        record = evaluated(run, questions, tmp_path / str(size), "--batch_size", str(size))
        found.append(record["results"][0]["results"]["cats_and_dogs"])
    for one in found:
        assert {name: one[f"{name},none"] for name in expected} == expected
        assert one == found[0]
    report = (tmp_path / "64" / "evaluate.md").read_text()
    assert f"| cats_and_dogs | acc | {expected['acc']:.4f} ± " in report
    assert "anGPT, SqrtLogN" in report


def test_whole_texts_and_generations(run: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs `make extras EXTRAS=eval`")
    from lm_eval.api.instance import Instance

    from anlit.evaluation.harness.model import HarnessModel

    checkpoint = load_checkpoint(str(run), "cpu")
    text = text_of(checkpoint)
    model = HarnessModel(checkpoint, text, batch_size=3, max_length=16)
    texts = ["the cat sat on the mat", " ".join(WORDS * 4), "a"]
    instances = [Instance("loglikelihood_rolling", {}, (one,), 0) for one in texts]
    for one, found in zip(texts, model.loglikelihood_rolling(instances, disable_tqdm=True), strict=True):
        assert found == pytest.approx(_rolled(checkpoint.model, [0, *text.encode(one)], 16), rel=1e-5)

    def generate(**settings: Any) -> str:
        return model.generate_until([Instance("generate_until", {}, ("the cat", settings), 0)], disable_tqdm=True)[0]

    whole = generate(until=[], max_gen_toks=8)
    with torch.no_grad():
        tokens = torch.tensor([text.encode("the cat")])
        for _ in range(8):
            logits = checkpoint.model(tokens)[:, -1, : text.size]
            tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    expected = tokens[0, -8:].tolist()
    expected = expected[: expected.index(0)] if 0 in expected else expected
    assert whole == text.decode(expected)
    assert len(whole) > 3
    assert generate(until=[whole[2:4], "zzz"], max_gen_toks=8) == whole[: whole.index(whole[2:4])]


@torch.no_grad()
def _rolled(model: Any, tokens: list[int], length: int) -> float:
    """The sum over all tokens but the first, in windows: of the last the earlier tokens are context alone."""
    total, done = 0.0, 1
    while done < len(tokens):
        end = min(done + length, len(tokens))
        begin = 0 if done == 1 else end - length - 1
        window = torch.tensor([tokens[begin:end]])
        ids = torch.ones_like(window[:, :-1])
        if begin == 0:
            ids[:, 0] = 0  # the separator is another document's
        logits = model(window[:, :-1], ids)[0].log_softmax(-1)
        total += logits.gather(-1, window[0, 1:, None])[-(end - done) :].sum().item()
        done = end
    return total


def test_mistakes_are_one_sentence(run: Path, questions: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def complaint(*arguments: str) -> str:
        assert main(["evaluate", str(run), "--output", str(tmp_path / "report"), *arguments]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "--tasks names no task" in complaint("--tasks", ",")
    assert "--batch_size is 0: set it to 1 or more" in complaint("--tasks", "x", "--batch_size", "0")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval.tasks", None)
        assert "run `make extras EXTRAS=eval`" in complaint("--tasks", "cats_and_dogs")
    pytest.importorskip("lm_eval", reason="needs `make extras EXTRAS=eval`")
    assert "is not a folder" in complaint("--tasks", "x", "--include_path", str(tmp_path / "none"))
    (run.parent / "data" / "tokenizer.json").rename(tmp_path / "hidden.json")
    task = ("--tasks", "cats_and_dogs", "--include_path", str(questions))
    assert "has no tokenizer" in complaint(*task)
    (tmp_path / "hidden.json").rename(run.parent / "data" / "tokenizer.json")
    (questions / "questions.jsonl").rename(tmp_path / "hidden.jsonl")
    assert "the data of a task in cats_and_dogs is not available" in complaint(*task)
    (tmp_path / "hidden.jsonl").rename(questions / "questions.jsonl")

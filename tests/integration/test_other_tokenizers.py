"""`anlit compare` on runs with two tokenizers: bits per byte of the same text."""

import hashlib
import json
import math
import re
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from anlit.cli import main
from anlit.evaluation.trained_model import load_checkpoint
from anlit.reporting.table import SafeConsole
from tests.integration.run_files import column

CONTEXT = 32
VOCABULARIES = {"small": 280, "large": 520}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two preparations of the same texts, and two runs on each."""
    root = tmp_path_factory.mktemp("tokenizers")
    texts = root / "texts"
    texts.mkdir()
    library = Path(sysconfig.get_path("stdlib"))
    for file in (library / "json").glob("*.py"):
        shutil.copy(file, texts)
    prepare = ["prepare", "TextFiles", "--source", str(texts), "--pattern", "*.py"]
    prepare += ["--tokenizer", "bpe", "--val_fraction", "0.2"]
    for name, vocabulary in VOCABULARIES.items():
        assert main([*prepare, f"--output={root / name}", f"--vocab_size={vocabulary}"]) == 0
        for seed in (1, 2):
            assert main(fit_arguments(root, name, seed)) == 0
    return root


def fit_arguments(root: Path, name: str, seed: int, *more: str) -> list[str]:
    return [
        "fit",
        "--model=GPT",
        f"--model.context_length={CONTEXT}",
        "--model.document_masking=false",
        "--model.n_layers=1",
        "--model.n_heads=2",
        "--model.d_model=32",
        "--model.optimizer.lr=0.01",
        "--data=TokenShards",
        f"--data.path={root / name}",
        "--data.batch_size=4",
        "--data.val_batch_size=64",
        f"--data.seed={seed}",
        f"--seed_everything={seed}",
        "--trainer.accelerator=cpu",
        "--trainer.max_steps=12",
        "--trainer.val_check_interval=4",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--name={name}-{seed}",
        f"--run_dir={root}/runs/{name}-{seed}",
        *more,
    ]


@pytest.fixture(scope="module")
def compared(root: Path) -> dict[str, Any]:
    """The record of the comparison."""
    arguments = ["--output", str(root / "out"), "--baseline", "small"]
    assert main(["compare", str(root / "runs"), *arguments]) == 0
    return json.loads((root / "out" / "convergence.json").read_text())


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def group_of(comparison: dict[str, Any], label: str) -> dict[str, Any]:
    (group,) = (group for group in comparison["groups"] if group["label"] == label)
    return group


def val_tokens(folder: Path) -> np.ndarray:
    """The tokens of the validation split, after the head of litdata's only chunk."""
    (chunk,) = folder.glob("val/*.bin")
    content = chunk.read_bytes()
    return np.frombuffer(content[12:], "<u2").astype(np.int64)


def val_documents(folder: Path) -> list[bytes]:
    """The documents of the validation split, decoded from their tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = manifest_of(folder)["end_of_document"]
    documents: list[list[int]] = [[]]
    for token in val_tokens(folder).tolist():
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    return [tokenizer.decode(tokens).encode() for tokens in documents[:-1]]


def naive_bits_per_byte(run: Path, folder: Path) -> float:
    """−Σ log2 p(token) in float64 over blocks of the context, over the bytes of the documents."""
    checkpoint = load_checkpoint(str(run / "checkpoints" / "last.ckpt"), device="cpu")
    model = checkpoint.model.double()
    tokens = torch.from_numpy(val_tokens(folder))
    bits = 0.0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, CONTEXT):
            block = tokens[begin : begin + CONTEXT + 1]
            (logits,) = model(block[None, :-1])  # (T, V)
            probabilities = torch.softmax(logits.double(), dim=-1)
            for row, target in zip(probabilities, block[1:].tolist(), strict=True):
                bits -= math.log2(row[target])
    n_bytes = sum(map(len, val_documents(folder)))
    # The first token has no prediction: it counts as the mean of the others.
    n_predicted = len(tokens) - 1
    return bits / n_predicted * len(tokens) / n_bytes


@pytest.mark.parametrize("name", VOCABULARIES)
def test_the_hash_of_the_text_is_the_sum_of_the_documents_hashes(root: Path, name: str) -> None:
    manifest = manifest_of(root / name)
    documents = val_documents(root / name)
    sources = {path.read_bytes() for path in (root / "texts").iterdir()}
    total = 0
    for document in documents:
        digest = hashlib.sha256(document).hexdigest()
        total += int(digest, 16)

    text_hash = manifest["val"]["text_sha256"]
    assert set(documents) < sources
    assert int(text_hash, 16) == total % 2**256
    assert text_hash != manifest["train"]["text_sha256"]


def test_two_tokenizers_have_other_tokens_of_the_same_text(root: Path) -> None:
    small = manifest_of(root / "small")
    large = manifest_of(root / "large")

    for split in ("train", "val"):
        assert small[split]["tokens"] > 1.2 * large[split]["tokens"]
        assert small[split]["text_sha256"] == large[split]["text_sha256"]
    assert small["content_sha256"] != large["content_sha256"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_losses_are_bits_per_byte_of_the_documents(
    root: Path, compared: dict[str, Any], name: str
) -> None:
    group = group_of(compared, name)
    expected = []
    for seed in (1, 2):
        run = root / "runs" / f"{name}-{seed}"
        expected.append(naive_bits_per_byte(run, root / name))

    assert compared["loss_unit"] == "bits per byte"
    assert group["final_loss"]["values"] == pytest.approx(expected, rel=1e-5)
    assert group["bits_per_byte"]["values"] == pytest.approx(expected, rel=1e-5)


def test_the_speed_up_is_over_bytes_of_training_text(root: Path, compared: dict[str, Any]) -> None:
    """A seed's speed-up: the text that the baseline needs for its final loss, over the other's."""
    large = group_of(compared, "large")
    expected = []
    for seed in (1, 2):
        small_text, small_loss = curve_over_text(root, "small", seed)
        large_text, large_loss = curve_over_text(root, "large", seed)
        target = small_loss[-1]
        text_of_small = first_text_at(target, small_text, small_loss)
        text_of_large = first_text_at(target, large_text, large_loss)
        expected.append(text_of_small / text_of_large if text_of_large else None)

    assert large["speedup_text"]["values"] == pytest.approx(expected, rel=1e-4)
    assert any(expected), "a speed-up is measured"
    assert "speedup_tokens" not in large


def curve_over_text(root: Path, name: str, seed: int) -> tuple[list[float], list[float]]:
    """The bytes of training text at each validation, and the bits per byte."""
    counts = manifest_of(root / name)["train"]
    bytes_per_token = counts["bytes"] / counts["tokens"]
    run = root / "runs" / f"{name}-{seed}"
    text = [tokens * bytes_per_token for tokens in column(run, "val/tokens")]
    return text, column(run, "val/bits_per_byte")


def first_text_at(target: float, text: list[float], loss: list[float]) -> float | None:
    """The text after which the loss reaches its target, on the line between two validations."""
    if loss[0] <= target:
        return text[0]
    for number in range(1, len(loss)):
        if loss[number] <= target:
            share = (loss[number - 1] - target) / (loss[number - 1] - loss[number])
            return text[number - 1] + share * (text[number] - text[number - 1])
    return None


def test_the_table_fits_80_columns_and_the_notes_say_what_is_compared(
    root: Path, compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("anlit.compare.comparison_report.terminal", lambda: SafeConsole(width=80))
    arguments = ["--output", str(root / "again"), "--baseline", "small"]

    assert main(["compare", str(root / "runs"), *arguments]) == 0

    printed = capsys.readouterr().out
    table, _, notes = printed.partition("note: ")
    assert max(map(len, table.splitlines())) <= 80
    assert {"bits", "text"} <= set(table.split())
    assert re.search(r"^small \(baseline\)", table, re.MULTILINE)
    words = " ".join(notes.split())
    assert "Tokenizers differ: losses are in bits per byte of validation text" in words
    assert "large: another tokenizer, " in words
    assert "OTHER" not in words
    assert "other data" not in words
    report = (root / "again" / "report.md").read_text()
    assert "bits per byte" in report
    assert "nats per token;" not in report
    assert "speed-up" in report


def test_a_sample_of_blocks_is_other_text_for_each_tokenizer(root: Path, capsys) -> None:
    """The losses are shown, without a test or a speed-up."""
    for name in VOCABULARIES:
        more = [f"--run_dir={root}/sampled/{name}", "--data.val_blocks=16"]
        assert main(fit_arguments(root, name, 1, *more)) == 0
    arguments = ["--output", str(root / "parts"), "--baseline", "small-1"]

    assert main(["compare", str(root / "sampled"), *arguments]) == 0

    record = json.loads((root / "parts" / "convergence.json").read_text())
    large = group_of(record, "large-1")
    assert large["final_loss"]["mean"] is not None
    assert large["speedup_text"]["values"] == []
    assert "validates on other parts of the text" in "\n".join(record["notes"])
    assert "other parts" in capsys.readouterr().out


def test_a_study_refuses_other_tokenizers_before_its_first_run(root: Path, refusal) -> None:
    config = str(root / "runs" / "small-1" / "config.yaml")
    arms = {}
    for name in VOCABULARIES:
        settings = {"data.init_args.path": str(root / name)}
        arms[name] = {"configs": [config], "settings": settings}
    content = {"baseline": "small", "seeds": [1], "arms": arms, "sections": ["convergence"]}
    path = root / "study.yaml"
    path.write_text(json.dumps(content))

    error = refusal("study", "--config", path, "--output", root / "study", "--dry_run")

    assert "arms 'small' and 'large' of" in error
    assert "different tokenizers, whose losses per token a study does not compare" in error

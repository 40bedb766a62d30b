"""Comparisons across tokenizers on synthetic runs: units, obstacles, notes on the text.

tests/integration/test_other_tokenizers.py has real runs.
"""

import math
from pathlib import Path
from typing import Any

import pytest

from anlit.compare import plots
from anlit.compare.compare import compare
from anlit.compare.comparison import Comparison
from anlit.errors import UserError
from tests.compare.conftest import NGPT
from tests.compare.reports import write_paired

TRAIN = {"documents": 90, "bytes": 40_000, "tokens": 20_000, "text_sha256": "a" * 64}
VAL = {"documents": 10, "bytes": 4_000, "tokens": 2_000, "text_sha256": "b" * 64}
"""Two bytes a token."""
BETTER = {100: 7.0, 200: 6.0, 300: 5.0, 400: 4.5}


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "plot_convergence", lambda *_: None)


def data(tokenizer: str, factor: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The record of data with tokens `factor` times as long, and with changes of `val`."""
    splits = {}
    for name, counts in (("train", TRAIN), ("val", VAL)):
        splits[name] = counts | {"tokens": round(counts["tokens"] / factor)}
    splits["val"] |= changes
    hashes = {"content_sha256": f"c-{tokenizer}", "tokenizer_sha256": tokenizer}
    return {"data": hashes | splits}


def two_tokenizers(
    make_run, of_other: dict[str, Any] | None = None, seeds: tuple[int, ...] = (1,), **settings: Any
) -> None:
    """Baseline `a` with two bytes a token, and `b` with four."""
    for seed in seeds:
        shift = 0.01 * seed**2
        losses = {tokens: loss + shift for tokens, loss in BETTER.items()}
        record = of_other or data("t1", 2.0)
        make_run(f"a{seed}", seed=seed, record=data("t0"), settings=settings)
        make_run(f"b{seed}", losses, NGPT, seed=seed, record=record, settings=settings)


def compared(tmp_path: Path, **options: Any) -> Comparison:
    return compare([str(tmp_path / "runs")], str(tmp_path / "out"), **options)


def test_losses_and_lengths_are_of_text(make_run, tmp_path: Path) -> None:
    """3 nats over 2 bytes are more than 4.5 over 4. It has them after 4 · 300 bytes, not 800."""
    two_tokenizers(make_run)

    report = compared(tmp_path)

    baseline, other = report.results
    assert baseline.final_loss.mean == pytest.approx(3 / math.log(2) / 2)
    assert other.final_loss.mean == pytest.approx(4.51 / math.log(2) / 4)
    # 6 nats over four bytes equal the baseline's 3 over two; the curve passes 6.0 after 201 tokens.
    assert other.speedup.values == pytest.approx((400 * 2 / (201 * 4),))
    assert [run.final_loss for run in report.runs] == [3.0, 4.51], "records stay in nats"


def test_with_one_tokenizer_all_stays_in_nats_per_token(make_run, tmp_path: Path) -> None:
    two_tokenizers(make_run, data("t0"))

    report = compared(tmp_path)

    assert report.raw()["loss_unit"] == "nats per token"
    assert report.baseline.final_loss.mean == 3.0


def test_time_is_per_byte(make_run, tmp_path: Path) -> None:
    two_tokenizers(make_run)
    runs = [tmp_path / "runs" / "a1", tmp_path / "runs" / "b1"]
    write_paired(tmp_path / "out", runs, [[1.0] * 8, [3.0] * 8])

    report = compared(tmp_path)

    ratio_of_times = report.results[1].time
    assert ratio_of_times is not None
    assert ratio_of_times.median == pytest.approx((3 / 4) / (1 / 2))
    over_text, over_time = plots.panels_of(report)
    assert over_text.x_label.startswith("bytes of training text")
    baseline_seconds = over_time.per_token[report.baseline.label] * 60
    assert baseline_seconds == pytest.approx(1 / 2), "a second a token of two bytes, in minutes"


SAME_SIZE = {"text_sha256": "c" * 64}
NO_HASH = {"text_sha256": None}


@pytest.mark.parametrize(
    ("of_other", "settings", "obstacle", "note"),
    [
        pytest.param(data("t1", 2.0), {}, "", "bytes per token of validation text", id="the same"),
        pytest.param(
            data("t1", 2.0, **SAME_SIZE), {}, "other text", "OTHER VALIDATION TEXT", id="hash"
        ),
        pytest.param(
            data("t1", 2.0, **NO_HASH), {}, "other text", "a folder without its hash", id="no hash"
        ),
        pytest.param(
            data("t1", 2.0),
            {"data.init_args.val_blocks": 3},
            "other parts of the text",
            "validates on other parts of the text, so there is no test",
            id="blocks",
        ),
        pytest.param(
            data("t1", 2.0),
            {"data.init_args.weights": {"a": 2}},
            "",
            "its bytes of training text are estimated",
            id="weights",
        ),
    ],
)
def test_only_losses_on_all_of_the_same_text_are_tested(
    make_run, tmp_path: Path, of_other: Any, settings: Any, obstacle: str, note: str
) -> None:
    two_tokenizers(make_run, of_other, seeds=(1, 2, 3), **settings)

    report = compared(tmp_path)

    other = report.results[1]
    has_no_test = other.loss is None
    assert other.speedup.obstacle == obstacle
    assert has_no_test == bool(obstacle)
    assert note in "\n".join(report.notes)
    assert other.final_loss.mean is not None


def test_the_contexts_of_two_tokenizers_are_named_in_tokens_and_bytes(
    make_run, tmp_path: Path
) -> None:
    two_tokenizers(make_run)

    notes = "\n".join(compared(tmp_path).notes)

    context = "a context of 256 tokens, about 1,024 bytes, the baseline 256 tokens, about 512 bytes"
    assert context in notes


FIRST_TOKENS = {"data.init_args.score_first_token": False}


@pytest.mark.parametrize(
    ("of_other", "settings", "reason"),
    [
        (data("t1", bytes=None), {}, "the text of its val tokens is not known"),
        (data("t1", changes={"changed": 2}), {}, "its tokenizer gives back documents as another"),
        (data("t1"), FIRST_TOKENS, "its loss leaves out the first token of each document (data.s"),
        (data("t1"), {}, "it validated on the beginning of its split (data.val_tokens, trainer.l"),
    ],
)
def test_a_run_without_bits_per_byte_is_refused(
    make_run, tmp_path: Path, of_other: Any, settings: dict[str, Any], reason: str
) -> None:
    two_tokenizers(make_run, of_other, **settings)
    metrics = tmp_path / "runs" / "b1" / "metrics.csv"
    metrics.write_text(metrics.read_text().replace("val/bits_per_byte", "other"))

    with pytest.raises(UserError) as refusal:
        compared(tmp_path)

    assert f"b1 has none, because {reason}" in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_settings_that_follow_from_the_tokenizer_are_no_other_task(
    make_run, tmp_path: Path
) -> None:
    make_run("a1", record=data("t0"))
    vocabulary = {"model.init_args.vocab_size": 512}
    make_run("b1", BETTER, NGPT, record=data("t1", 2.0), settings=vocabulary)

    notes = "\n".join(compared(tmp_path).notes)

    assert "trained differently" not in notes
    assert "other data" not in notes

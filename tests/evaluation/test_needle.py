"""`anlit needle`: scores of models that look the answer up, and their report."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from anlit import GPT, AnGPT, TokenShards
from anlit.commands.evaluations import main
from anlit.data.needle import Haystack
from anlit.evaluation import needle
from anlit.evaluation.needle import (
    average_seeds,
    draw_accuracy,
    length_name,
    score_answers,
    wilson_interval,
)
from anlit.evaluation.settings import NeedleSettings
from anlit.reporting.figure import style
from tests.evaluation.saved import make_run
from tests.nn.models.tiny import tiny

VOCABULARY = 320
SUFFIX_LENGTH = 6
LOGIT = 10.0
"""The token that a `Finder` predicts has it; all other logits are 0."""


def never(total: int) -> bool:
    return False


class Finder(nn.Module):
    """Finds the latest earlier copy of the last 6 tokens, and predicts the token after it.

    It sees the last `reach` tokens. If `errs` is true of their sum, it predicts another token.
    """

    def __init__(self, reach: int = 10_000, errs: Callable[[int], bool] = never) -> None:
        super().__init__()
        self.reach = reach
        self.errs = errs
        self.unused = nn.Parameter(torch.zeros(1))

    def model(self, tokens: Tensor, n_logits: int) -> Tensor:
        rows = list(map(self.predict_all, tokens.tolist()))
        predictions = torch.tensor(rows)[:, -n_logits:]
        return one_hot(predictions, VOCABULARY) * LOGIT

    def predict_all(self, tokens: list[int]) -> list[int]:
        predictions = []
        for end in range(1, len(tokens) + 1):
            predictions.append(self.predict(tokens[:end]))
        return predictions

    def predict(self, context: list[int]) -> int:
        context = context[-self.reach :]
        suffix = context[-SUFFIX_LENGTH:]
        latest_end = len(context) - 1
        for end in range(latest_end, SUFFIX_LENGTH - 1, -1):
            start = end - SUFFIX_LENGTH
            if context[start:end] == suffix:
                error = int(self.errs(sum(context)))
                return (context[end] + error) % VOCABULARY
        return 0


def make_samples(haystack: Haystack, length: int, depths: Iterable[float]) -> Any:
    """A sample with its answer at each depth."""
    samples = []
    for number, depth in enumerate(depths):
        random = np.random.RandomState(number)
        samples.append(haystack.sample(length, depth, random, held_out=True))
    return samples


@pytest.fixture(scope="module")
def haystack(tiny_shards: str) -> Haystack:
    return Haystack(TokenShards(tiny_shards), "val")


def measure(model: Any, haystack: Haystack, length: int, seed: int = 0) -> dict[str, Any]:
    """The scores of 3 samples at each of 5 depths."""
    settings = NeedleSettings(n_depths=5, n_samples=3, seed=seed)
    return needle.measure_accuracy(model, haystack, length, settings)


@pytest.mark.parametrize("length", [130, 256])
def test_a_model_that_looks_up_finds_every_needle(haystack: Haystack, length: int) -> None:
    result = measure(Finder(), haystack, length)

    expected_nats = -math.log1p((VOCABULARY - 1) * math.exp(-LOGIT))
    assert result["accuracy"] == 1
    assert result["nats_per_token"] == pytest.approx(expected_nats, rel=1e-3)
    assert len(result["by_depth"]) == 5
    for depth in result["by_depth"]:
        assert depth["nats_per_token"] == pytest.approx(expected_nats, rel=1e-3)
        assert depth["mean_depth"] == pytest.approx(depth["depth"], abs=0.05 + 1 / 60)


def test_a_model_that_sees_half_the_text_finds_the_later_needles(haystack: Haystack) -> None:
    result = measure(Finder(reach=130), haystack, 320)

    earlier_half = {0: 0, 0.25: 0, 0.5: 0}
    later_half = {0.75: 3, 1: 3}
    matches = {depth["depth"]: depth["matches"] for depth in result["by_depth"]}
    assert matches == earlier_half | later_half


def test_a_match_is_an_answer_of_greedy_decoding(haystack: Haystack) -> None:
    model: Any = Finder(errs=lambda total: total % 8 == 0)
    samples = make_samples(haystack, 120, np.linspace(0, 1, 16))

    is_match, _ = score_answers(model, samples)

    is_decoded = []
    for sample in samples:
        tokens = sample.tokens[: -sample.n_answer].tolist()
        answer = sample.tokens[-sample.n_answer :].tolist()
        decoded = []
        for _ in answer:
            decoded.append(model.predict(tokens + decoded))
        is_decoded.append(decoded == answer)
    assert is_match.tolist() == is_decoded
    assert 0 < sum(is_decoded) < 16


def test_the_log_likelihood_is_of_the_answer(haystack: Haystack) -> None:
    model = tiny(AnGPT, vocab_size=VOCABULARY).eval()
    samples = make_samples(haystack, 130, [0.5] * 6)
    lengths_of_answers = {sample.n_answer for sample in samples}
    assert len(lengths_of_answers) > 1

    _, log_likelihoods = score_answers(model, samples)

    for sample, log_likelihood in zip(samples, log_likelihoods, strict=True):
        tokens = torch.from_numpy(sample.tokens)
        (logits,) = model(tokens[None, :-1])
        by_token = -cross_entropy(logits, tokens[1:], reduction="none")
        of_answer = by_token[-sample.n_answer :].sum()
        torch.testing.assert_close(log_likelihood, of_answer, rtol=1e-4, atol=0)


def test_samples_depend_on_neither_model_nor_batch(
    haystack: Haystack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_depth(name: str, model: Any, seed: int = 0) -> list[float]:
        result = measure(model, haystack, 130, seed)
        return [depth[name] for depth in result["by_depth"]]

    model = tiny(GPT, vocab_size=VOCABULARY).eval()
    nats = by_depth("nats_per_token", model)
    monkeypatch.setattr(needle, "MAX_SAMPLE_TOKENS", 300)

    nats_in_smaller_batches = by_depth("nats_per_token", model)
    nats_of_another_seed = by_depth("nats_per_token", model, seed=1)

    assert nats_in_smaller_batches == pytest.approx(nats, rel=1e-4)
    assert nats_of_another_seed != pytest.approx(nats, rel=1e-4)
    assert by_depth("mean_depth", model) == by_depth("mean_depth", Finder())
    assert len(set(nats)) == 5


def seed_result(accuracy: float) -> dict[str, float]:
    return {"length": 512, "accuracy": accuracy, "nats_per_token": accuracy - 1}


def test_seeds_are_averaged() -> None:
    seeds = (seed_result(0.75), seed_result(0.25))

    average = average_seeds(seeds, 20)

    assert average["accuracy"] == 0.5
    assert average["nats_per_token"] == -0.5
    assert average["accuracy_sd"] == pytest.approx(math.sqrt(0.125))
    assert average["interval_95"] == wilson_interval(0.5, 20)


@pytest.mark.parametrize(
    ("training_lengths", "name"),
    [([512], "1,024 (2×)"), ([512, 512], "1,024 (2×)"), ([512, 256], "1,024")],
)
def test_a_length_is_a_multiple_if_models_were_trained_at_one(training_lengths, name) -> None:
    checkpoints = [{"training_length": length} for length in training_lengths]

    assert length_name({"checkpoints": checkpoints}, 1024) == name


def test_a_single_seed_has_no_deviation() -> None:
    average = average_seeds((seed_result(0.75),), 4)

    assert average["accuracy_sd"] is None


@pytest.mark.parametrize(
    ("n_matches", "n"),
    [
        pytest.param(10, 20, id="half"),
        pytest.param(0, 20, id="none"),
        pytest.param(165, 220, id="three quarters of many"),
    ],
)
def test_the_interval_is_wilsons(n_matches: int, n: int) -> None:
    low, high = wilson_interval(n_matches / n, n)

    expected = binomtest(n_matches, n).proportion_ci(method="wilson")
    assert low == pytest.approx(expected.low, abs=1e-6)
    assert high == pytest.approx(expected.high, abs=1e-6)


def depths_with_matches(*matches: int) -> dict[str, Any]:
    """A seed's result at a length, with two samples at each depth."""
    by_depth = [{"matches": n, "samples": 2} for n in matches]
    return {"by_depth": by_depth}


def texts_of(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def drawn_numbers(axes: Any) -> list[list[float]]:
    """The numbers of a heat map. Its first row prints the same numbers."""
    (image,) = axes.images
    numbers: list[list[float]] = image.get_array().tolist()
    first_row, *_ = numbers
    printed = texts_of(axes.texts[:2])
    assert image.get_clim() == (0, 1)
    assert list(map(float, printed)) == first_row
    return numbers


def test_the_heat_map_shows_the_accuracies() -> None:
    """Two seeds find some needles, and another finds none."""
    all_found = depths_with_matches(2, 2)
    none_found = depths_with_matches(0, 0)
    first_seed = [all_found, depths_with_matches(1, 2)]
    second_seed = [all_found, depths_with_matches(0, 1)]
    finds_none = [none_found, none_found]
    record = {
        "settings": {"lengths": [128, 512], "depths": [0.0, 1.0]},
        "checkpoints": [{"training_length": 128}] * 3,
        "arms": [
            {"label": "anGPT, SqrtLogN", "checkpoints": [0, 2]},
            {"label": "GPT+, plain", "checkpoints": [1]},
        ],
        "measurements": [first_seed, finds_none, second_seed],
    }

    with style(8):
        first, second, _ = draw_accuracy(record).axes

    assert drawn_numbers(first) == [[1, 0.25], [1, 0.75]]
    assert drawn_numbers(second) == [[0, 0], [0, 0]]
    assert texts_of(first.get_xticklabels()) == ["128\n(1×)", "512\n(4×)"]
    assert texts_of(first.get_yticklabels()) == ["0", "100"]
    assert first.get_title(loc="left") == "anGPT, √(2 log n) (2\N{NO-BREAK SPACE}seeds)"


def test_the_command_writes_numbers_page_and_figure(
    tiny_shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The models are untrained."""
    data = Path(tiny_shards)
    runs = [
        make_run(tmp_path / "0", data, GPT, 1, context_length=128),
        make_run(tmp_path / "1", data, GPT, 2, context_length=128),
        make_run(tmp_path / "2", data, AnGPT, 1, context_length=128),
        make_run(tmp_path / "3", data, GPT, 2, context_length=128),
    ]
    options = [f"--output={tmp_path}", "--lengths=128,256", "--depths=3", "--samples=2"]

    main(["needle", *map(str, runs), *options])

    record = json.loads((tmp_path / "needle.json").read_text())
    manifest = TokenShards(tiny_shards).manifest
    assert record["command"].startswith("anlit needle ")
    assert record["data"]["content_sha256"] == manifest["content_sha256"]
    pair, single = record["arms"]
    lengths = [result["length"] for result in pair["lengths"]]
    assert pair["checkpoints"] == [0, 3]
    assert single["checkpoints"] == [2]
    assert lengths == [128, 256]
    _, at_256 = record["measurements"][0]
    start, middle, end = at_256["by_depth"]
    assert start["depth"] == 0
    assert middle["depth"] == 0.5
    assert end["depth"] == 1
    for depth in (start, middle, end):
        assert depth["samples"] == 2
        assert depth["matches"] == 0
    page = (tmp_path / "needle.md").read_text()
    assert "| configuration | seeds | 128 (1×) tokens | 256 (2×) tokens |" in page
    assert "0.000 ± 0.000 [0.000, 0.390]" in page
    assert (tmp_path / "needle.png").stat().st_size > 10_000
    note = f"{runs[1]}/checkpoints/best.ckpt is left out, because a later run has the same seed."
    assert note in page
    printed = capsys.readouterr().out
    assert f"note: GPT+, scale-invariant: {note}" in printed
    assert "needle.html" in printed

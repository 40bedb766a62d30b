"""`anlit needle`: models that look the answer up score what they should, the report says so, mistakes are told."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn.functional import one_hot

from anlit import GPT, AnGPT, TokenShards
from anlit.commands.evaluations import main
from anlit.data.needle import Haystack
from anlit.evaluation import needle
from anlit.evaluation.needle import average_seeds, draw_accuracy, score_answers, wilson_interval
from anlit.evaluation.settings import NeedleSettings
from anlit.reporting.figure import style
from tests.evaluation.saved import make_run
from tests.nn.models.tiny import tiny

VOCABULARY = 320
SUFFIX = 6
SURE = 10.0


class Finder(nn.Module):
    """Finds the latest place before where the last 6 tokens stood, and says what followed them.

    It sees the last `reach` tokens, and says something else if `errs` is true of their sum.
    """

    def __init__(
        self, reach: int = 10_000, errs: Callable[[int], bool] = lambda total: False
    ) -> None:
        super().__init__()
        self.reach, self.errs, self.unused = reach, errs, nn.Parameter(torch.zeros(1))

    def model(self, tokens: Tensor, n_logits: int) -> Tensor:
        rows = [[self.next(row[: end + 1]) for end in range(len(row))] for row in tokens.tolist()]
        return one_hot(torch.tensor(rows)[:, -n_logits:], VOCABULARY) * SURE

    def next(self, seen: list[int]) -> int:
        seen = seen[-self.reach :]
        for start in range(len(seen) - SUFFIX - 1, -1, -1):
            if seen[start : start + SUFFIX] == seen[-SUFFIX:]:
                return (seen[start + SUFFIX] + self.errs(sum(seen))) % VOCABULARY
        return 0


@pytest.fixture(scope="module")
def haystack(tiny_shards: str) -> Haystack:
    return Haystack(TokenShards(tiny_shards), "val")


def measure(model: Any, haystack: Haystack, length: int, seed: int = 0) -> dict[str, Any]:
    """The scores of 3 samples at each of 5 depths."""
    return needle.measure_accuracy(
        model, haystack, length, NeedleSettings(n_depths=5, n_samples=3, seed=seed)
    )


@pytest.mark.parametrize("length", [130, 256])
def test_a_model_that_looks_up_finds_every_needle(haystack: Haystack, length: int) -> None:
    scores = measure(Finder(), haystack, length)
    assert scores["accuracy"] == 1
    nats = [own["nats_per_token"] for own in (scores, *scores["by_depth"])]
    assert nats == pytest.approx([-math.log1p((VOCABULARY - 1) * math.exp(-SURE))] * 6, rel=1e-3)
    assert max(abs(own["mean_depth"] - own["depth"]) for own in scores["by_depth"]) <= 0.05 + 1 / 60


def test_a_model_that_sees_half_the_text_finds_the_later_needles(haystack: Haystack) -> None:
    scores = measure(Finder(reach=130), haystack, 320)["by_depth"]
    assert [(own["depth"], own["matches"]) for own in scores] == [
        (0, 0),
        (0.25, 0),
        (0.5, 0),
        (0.75, 3),
        (1, 3),
    ]


def test_exact_match_is_what_greedy_decoding_gives(haystack: Haystack) -> None:
    model = Finder(errs=lambda total: total % 8 == 0)
    samples = [haystack.sample(120, i / 15, np.random.RandomState(i), True) for i in range(16)]
    match, _ = score_answers(model, samples)
    decoded = []
    for sample in samples:
        prompt, answer = (part.tolist() for part in np.split(sample.tokens, [-sample.n_answer]))
        for _ in answer:
            prompt.append(model.next(prompt))
        decoded.append(prompt[-sample.n_answer :] == answer)
    assert match.tolist() == decoded
    assert 0 < sum(decoded) < 16


def test_log_likelihood_is_that_of_the_answer(haystack: Haystack) -> None:
    model = tiny(AnGPT, vocab_size=VOCABULARY).eval()
    samples = [haystack.sample(130, 0.5, np.random.RandomState(i), True) for i in range(6)]
    assert len({sample.n_answer for sample in samples}) > 1
    _, log_likelihoods = score_answers(model, samples)
    for sample, value in zip(samples, log_likelihoods.tolist(), strict=True):
        tokens = torch.from_numpy(sample.tokens)[None]
        each = model(tokens[:, :-1]).log_softmax(-1)[0, range(130), tokens[0, 1:]]
        assert value == pytest.approx(float(each[-sample.n_answer :].sum().detach()), rel=1e-4)


def test_samples_depend_on_neither_model_nor_batch(
    haystack: Haystack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_depth(name: str, model: Any, seed: int = 0) -> list[float]:
        return [own[name] for own in measure(model, haystack, 130, seed)["by_depth"]]

    model = tiny(GPT, vocab_size=VOCABULARY).eval()
    at_once = by_depth("nats_per_token", model)
    monkeypatch.setattr(needle, "MAX_SAMPLE_TOKENS", 300)
    assert by_depth("nats_per_token", model) == pytest.approx(at_once, rel=1e-4)
    assert by_depth("mean_depth", model) == by_depth("mean_depth", Finder())
    assert by_depth("nats_per_token", model, seed=1) != pytest.approx(at_once, rel=1e-4)
    assert len(set(at_once)) == 5


def test_seeds_are_averaged_and_the_interval_is_wilsons() -> None:
    seeds = [
        {"length": 512, "accuracy": share, "nats_per_token": share - 1} for share in (0.75, 0.25)
    ]
    both = average_seeds(tuple(seeds), 20)
    assert (both["accuracy"], both["nats_per_token"]) == (0.5, -0.5)
    assert both["accuracy_sd"] == pytest.approx(np.std([0.75, 0.25], ddof=1))
    assert average_seeds((seeds[0],), 4)["accuracy_sd"] is None
    for interval, hits, n in (
        (both["interval_95"], 10, 20),
        (wilson_interval(0, 20), 0, 20),
        (wilson_interval(0.75, 220), 165, 220),
    ):
        expected = binomtest(hits, n).proportion_ci(method="wilson")
        assert interval == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_the_heat_map_shows_the_accuracies() -> None:
    """Two lengths and depths; two seeds that find some, and one that finds none."""
    matches = [(2, 2), (1, 2)], [(0, 0), (0, 0)], [(2, 2), (0, 1)]
    record = {
        "settings": {"lengths": [128, 512], "depths": [0.0, 1.0]}, "checkpoints": [{"training_length": 128}] * 3,
        "arms": [{"label": "anGPT, SqrtLogN", "checkpoints": [0, 2]}, {"label": "GPT+, plain", "checkpoints": [1]}],
        "measurements": [[{"by_depth": [{"matches": n, "samples": 2} for n in depths]} for depths in seed]
                         for seed in matches],
    }  # fmt: skip
    with style(8):
        first, second, _ = draw_accuracy(record).axes
    for ax, shown in ((first, [[1, 0.25], [1, 0.75]]), (second, [[0, 0], [0, 0]])):
        assert ax.images[0].get_array().tolist() == shown
        assert ax.images[0].get_clim() == (0, 1)
        assert [float(text.get_text()) for text in ax.texts[:2]] == shown[0]
    ticks = [
        [label.get_text() for label in labels]
        for labels in (first.get_xticklabels(), first.get_yticklabels())
    ]
    assert ticks == [["128\n(1×)", "512\n(4×)"], ["0", "100"]]
    assert first.get_title(loc="left") == "anGPT, √(2 log n) (2\N{NO-BREAK SPACE}seeds)"


def test_the_command_writes_numbers_page_and_picture(
    tiny_shards: str, tmp_path: Path, capsys
) -> None:
    kinds = enumerate([(GPT, 1), (GPT, 2), (AnGPT, 1)])  # untrained
    runs = [
        str(make_run(tmp_path / str(n), Path(tiny_shards), *kind, context_length=128))
        for n, kind in kinds
    ]
    main(
        ["needle", *runs, f"--output={tmp_path}", "--lengths=128,256", "--depths=3", "--samples=2"]
    )
    record = json.loads((tmp_path / "needle.json").read_text())
    assert record["command"].startswith("anlit needle ")
    assert record["data"]["content_sha256"] == TokenShards(tiny_shards).manifest["content_sha256"]
    assert [arm["checkpoints"] for arm in record["arms"]] == [[0, 1], [2]]
    assert [own["length"] for own in record["arms"][0]["lengths"]] == [128, 256]
    scores = record["measurements"][0][1]["by_depth"]
    assert [(own["depth"], own["samples"], own["matches"]) for own in scores] == [
        (0, 2, 0),
        (0.5, 2, 0),
        (1, 2, 0),
    ]
    page = (tmp_path / "needle.md").read_text()
    assert "| configuration | seeds | 128 (1×) tokens | 256 (2×) tokens |" in page
    assert "0.000 ± 0.000 [0.000, 0.390]" in page
    assert (tmp_path / "needle.png").stat().st_size > 10_000
    assert "needle.html" in capsys.readouterr().out

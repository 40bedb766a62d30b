"""`anlit needle`: models that look the answer up score what they should, the report says so, mistakes are told."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.stats import binomtest
from torch import Tensor, nn
from torch.nn.functional import one_hot

from anlit import GPT, AnGPT, TextFiles, TokenShards
from anlit.commands.needle import main, needle
from anlit.errors import UserError
from anlit.evaluation.needle import checkpoints as needle_checkpoints
from anlit.evaluation.needle import score as scoring
from anlit.evaluation.needle.haystack import Haystack
from anlit.evaluation.needle.plot import plot_heat_maps
from anlit.evaluation.needle.score import Scores, measure, score
from anlit.evaluation.needle.settings import Settings
from anlit.evaluation.needle.tables import ArmScores, Results, wilson
from tests.data.conftest import write_corpus
from tests.evaluation.saved import make_run
from tests.models.tiny import tiny

VOCABULARY = 320
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
SUFFIX = 6
SURE = 10.0


class Lookup(nn.Module):
    """Finds the latest place before where the last 6 tokens stood, and says what followed them.

    Args:
        reach: How far back it sees; everything if None.
        errs: Whether it says something else after such a sum of tokens.
    """

    def __init__(self, reach: int | None = None, errs: Any = lambda total: total < 0) -> None:
        super().__init__()
        self.reach, self.errs = reach, errs

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None, n_logits: int = 0) -> Tensor:
        rows = [[self.next(row[: end + 1]) for end in range(len(row))] for row in tokens.tolist()]
        return self.logits(torch.tensor(rows)[:, -n_logits:])

    def next(self, seen: list[int]) -> int:
        last = seen[-SUFFIX:]
        earliest = 0 if self.reach is None else max(0, len(seen) - self.reach)
        for start in range(len(seen) - SUFFIX - 1, earliest - 1, -1):
            if seen[start : start + SUFFIX] == last:
                found = seen[start + SUFFIX]
                return (found + 1) % VOCABULARY if self.errs(sum(seen)) else found
        return 0

    def logits(self, h: Tensor) -> Tensor:
        return one_hot(h, VOCABULARY) * SURE


class Finder(nn.Module):
    vocab_size, context_length = VOCABULARY, 128

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.model, self.unused = Lookup(**settings), nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return self.model(tokens, document_ids)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needle")
    write_corpus(folder / "text")
    data = TextFiles(str(folder / "text"), str(folder / "shards"), vocab_size=VOCABULARY, val_fraction=0.3)
    data.prepare_data()
    return folder / "shards"


@pytest.fixture(scope="module")
def haystack(shards: Path) -> Haystack:
    return Haystack.of(TokenShards(str(shards)), "val")


@pytest.mark.parametrize("length", [130, 256])
def test_a_model_that_looks_up_finds_every_needle(haystack: Haystack, length: int) -> None:
    told: list[int] = []
    scores = measure(Finder(), haystack, length, DEPTHS, 3, seed=0, advance=told.append)
    assert scores.match.shape == (5, 3)
    assert scores.accuracy == 1
    assert scores.nats_per_token == pytest.approx(-math.log1p((VOCABULARY - 1) * math.exp(-SURE)), rel=1e-3)
    assert sum(told) == 15
    assert np.abs(scores.depth - scores.asked[:, None]).max() <= 0.05 + 1 / 60


def test_a_model_that_sees_half_the_text_finds_the_later_needles(haystack: Haystack) -> None:
    scores = measure(Finder(reach=160), haystack, 320, DEPTHS, 3, seed=0)
    assert scores.match.mean(1).tolist() == [0, 0, 0, 1, 1]


def test_an_untrained_model_finds_none(haystack: Haystack) -> None:
    model = tiny(GPT, vocab_size=VOCABULARY).eval()
    scores = measure(model, haystack, 130, DEPTHS, 4, seed=0)
    assert scores.accuracy == 0
    assert scores.nats_per_token == pytest.approx(-math.log(VOCABULARY), rel=0.1)
    assert "logits" not in vars(model.model)  # the head is back


def greedy(model: Finder, prompt: list[int], count: int) -> list[int]:
    for _ in range(count):
        prompt = [*prompt, int(model(torch.tensor([prompt]))[0, -1].argmax())]
    return prompt[-count:]


def test_exact_match_is_what_greedy_decoding_gives(haystack: Haystack) -> None:
    model = Finder(errs=lambda total: total % 8 == 0)
    samples = [haystack.sample(120, i / 15, np.random.RandomState(i), True) for i in range(16)]
    match, _ = score(model, samples, torch.device("cpu"))
    decoded = []
    for sample in samples:
        *prompt, answer = np.split(sample.tokens, [-sample.n_answer])
        decoded.append(greedy(model, prompt[0].tolist(), sample.n_answer) == answer.tolist())
    assert match.tolist() == decoded
    assert 0 < sum(decoded) < 16


def test_log_likelihood_is_that_of_the_answer(haystack: Haystack) -> None:
    model = tiny(AnGPT, vocab_size=VOCABULARY).eval()
    samples = [haystack.sample(130, 0.5, np.random.RandomState(i), True) for i in range(6)]
    assert len({sample.n_answer for sample in samples}) > 1
    _, found = score(model, samples, torch.device("cpu"))
    for sample, value in zip(samples, found.tolist(), strict=True):
        tokens = torch.from_numpy(sample.tokens)[None]
        each = model(tokens[:, :-1]).log_softmax(-1)[0, range(130), tokens[0, 1:]]
        assert value == pytest.approx(float(each[-sample.n_answer :].sum().detach()), rel=1e-4)


def test_samples_depend_on_neither_model_nor_batch(haystack: Haystack, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(GPT, vocab_size=VOCABULARY).eval()
    one = measure(model, haystack, 130, DEPTHS, 3, seed=0)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 300)
    two = measure(model, haystack, 130, DEPTHS, 3, seed=0)
    np.testing.assert_allclose(one.log_likelihood, two.log_likelihood, rtol=1e-4)
    assert (one.depth == measure(Finder(), haystack, 130, DEPTHS, 3, seed=0).depth).all()
    other = measure(model, haystack, 130, DEPTHS, 3, seed=1)
    assert not np.allclose(one.log_likelihood, other.log_likelihood)
    assert len(np.unique(one.log_likelihood)) == 15


def scores_of(match: list[list[int]], length: int) -> Scores:
    table = np.array(match, dtype=bool)
    return Scores(length, np.array([0.0, 1.0]), table * 0.5, table, table - 1.0, np.full(table.shape, 4))


def two_arms() -> Results:
    one = {128: scores_of([[1, 1], [1, 1]], 128), 512: scores_of([[1, 0], [1, 1]], 512)}
    two = {128: scores_of([[1, 1], [1, 1]], 128), 512: scores_of([[0, 0], [1, 0]], 512)}
    bad = {128: scores_of([[0, 0], [0, 0]], 128), 512: scores_of([[0, 0], [0, 0]], 512)}
    arms = [ArmScores("anGPT, scale-invariant", (0, 2), (one, two)), ArmScores("GPT+, plain", (1,), (bad,))]
    return Results(arms, [128, 512], [0.0, 1.0], 2, [128])


def test_seeds_are_averaged() -> None:
    arm, other = two_arms().arms
    assert arm.accuracy(128) == 1
    assert arm.accuracy(512) == 0.5
    assert arm.accuracy_sd(512) == pytest.approx(np.std([0.75, 0.25], ddof=1))
    assert arm.by_depth(512).tolist() == [0.25, 0.75]
    assert arm.nats_per_token(512) == pytest.approx((-1 / 16 - 3 / 16) / 2)
    assert arm.interval(512) == wilson(0.5, 4)
    assert other.accuracy_sd(512) is None


def test_the_interval_is_wilsons() -> None:
    for hits, n in ((0, 20), (20, 20), (7, 55), (219, 220)):
        expected = binomtest(hits, n).proportion_ci(method="wilson")
        assert wilson(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize("n_arms", [1, 2, 6])
def test_the_heat_map_shows_the_accuracies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_arms: int) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(plt, "close", kept.append)
    results = two_arms()
    arms = [results.arms[i % 2] for i in range(n_arms)]
    plot_heat_maps(replace(results, arms=arms), tmp_path / "needle.png")
    panels = [ax for ax in kept[0].axes if ax.get_title(loc="left")]
    assert len(panels) == n_arms
    for ax, arm in zip(panels, arms, strict=True):
        shown = ax.images[0]
        assert shown.get_array().T.tolist() == [arm.by_depth(128).tolist(), arm.by_depth(512).tolist()]
        assert shown.get_clim() == (0, 1)
        assert [text.get_text() for text in ax.texts[:2]] == [f"{arm.by_depth(n)[0]:.2f}" for n in (128, 512)]
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == ["128\n(1×)", "512\n(4×)"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["0", "100"]
    assert "(2\N{NO-BREAK SPACE}seeds)" in panels[0].get_title(loc="left")
    assert kept[0].axes[-1].get_ylabel() == "exact-match accuracy"
    assert (tmp_path / "needle.png").stat().st_size > 10_000
    monkeypatch.undo()
    plt.close(kept[0])


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two seeds of GPT+ and one anGPT, untrained."""
    folder, size = tmp_path_factory.mktemp("runs"), {"context_length": 128}
    kinds = {"gpt-1": (GPT, 1), "gpt-2": (GPT, 2), "angpt": (AnGPT, 1)}
    return [str(make_run(folder / name, shards, kind, seed, **size)) for name, (kind, seed) in kinds.items()]


def test_the_command_writes_numbers_page_and_picture(
    runs: list[str], shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*runs, "--output", str(tmp_path), "--lengths", "128,256", "--depths", "3", "--samples", "2"]
    assert main(arguments) == 0
    record = json.loads((tmp_path / "needle.json").read_text())
    assert record["command"].startswith("anlit needle ")
    assert record["data"]["content_sha256"] == TokenShards(str(shards)).manifest["content_sha256"]
    assert [arm["checkpoints"] for arm in record["arms"]] == [[0, 1], [2]]
    assert [one["length"] for one in record["arms"][0]["lengths"]] == [128, 256]
    cell = record["measurements"][0][1]["by_depth"]
    assert [one["depth"] for one in cell] == [0, 0.5, 1]
    assert all(one["samples"] == 2 and one["matches"] == 0 for one in cell)
    page = (tmp_path / "needle.md").read_text()
    assert "| configuration | seeds | 128 (1×) tokens | 256 (2×) tokens |" in page
    assert "0.000 ± 0.000 [0.000, 0.390]" in page
    assert (tmp_path / "needle.png").stat().st_size > 10_000
    assert "GPT+" in (printed := capsys.readouterr().out)
    assert "needle.png" in printed


def test_default_lengths_are_multiples_of_the_training_length(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def remember(model: Any, haystack: Haystack, length: int, *how: Any) -> Scores:
        asked.append(length)
        return scores_of([[1, 1], [1, 0]], length)

    monkeypatch.setattr(needle_checkpoints, "measure", remember)
    record = needle(runs[:1], str(tmp_path), Settings(n_depths=2, n_samples=2))
    assert asked == [128, 512, 2048]
    assert record["arms"][0]["lengths"][2]["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        (["--depths", "0"], ["--depths", "1 or more"]),
        (["--samples", "0"], ["--samples", "1 or more"]),
        (["--seed", "-1"], ["--seed", "0 or more"]),
        (["--lengths", "many"], ["--lengths", "many"]),
    ],
)
def test_mistakes_are_one_sentence(runs: list[str], tmp_path: Path, extra: list[str], names: list[str]) -> None:
    with pytest.raises(UserError) as error:
        main([runs[0], "--output", str(tmp_path), *extra])
    for name in names:
        assert name in str(error.value)
    assert not (tmp_path / "needle.json").exists()

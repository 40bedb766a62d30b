"""`anlit needle`: how often models find a number in a long text, by depth and length.

A match means that greedy decoding after the question gives the 7 digits, in the tokens of the tokenizer. This needs no
decoding: greedy decoding gives the answer if and only if each of its tokens is the argmax given the question and the
answer's tokens before it. So one forward pass over the sample with its answer is enough. (Other tokens that spell the
same digits are no match; a tokenizer writes a number in one way.)
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from anlit.analysis.statistics import Summary
from anlit.checkpoints.loading import Checkpoint
from anlit.data.module import TokenShards
from anlit.data.needle import EVALUATION, Haystack, Sample
from anlit.data.order.blocks import generator
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import NeedleSettings
from anlit.models.language_model import LanguageModel
from anlit.models.runtime import enough_memory
from anlit.reporting.figure import TEXT, heat_map, legend_name
from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import literal, minus, say

BATCH_TOKENS = 1 << 14
"""Tokens in a forward pass, unless one sample is longer."""
Z = 1.959964
"""Quantile of the normal distribution for 95 %."""
COLUMNS, MOST_COLUMNS = 3, 18
"""Panels in a row, and columns of cells that fit into it."""
MOST_CELLS, FEW_DEPTHS = 12, 11
"""Cells show their numbers in a row of panels with at most so many columns of cells, and up to so many depths."""
DEFINITION = """\
Accuracy is the share of samples whose 7 digits greedy decoding gives exactly, averaged over {n_depths} depths with
{n_samples} samples each. Brackets have the 95 % interval (Wilson) for {n} samples. All seeds and all configurations
with one tokenizer get the same samples. ± is the standard deviation over seeds. The log-likelihood is that of the
answer's tokens given all tokens before them: 0 is certainty, −ln V is guessing among all V tokens. It differs between
configurations even if their accuracy is 0."""


class Needle(Evaluation):
    """How often a number is found in a long text, by depth and length."""

    name = page = "needle"
    settings: NeedleSettings

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """The lengths and depths; raises UserError if such samples cannot be made of the validation split."""
        self.haystack = Haystack(data, "val")
        self.lengths = self.settings.lengths_for(each.training_length for each in checkpoints)
        for length in self.lengths:
            self.haystack.check(length)
        return {"lengths": self.lengths, "depths": self.settings.depths}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        measurements = []
        for length in self.lengths:
            measurements.append(measure(checkpoint.model, self.haystack, length, self.settings))
            say(f"{checkpoint.file}: accuracy {measurements[-1]['accuracy']:.3f} at {length:,}")
        return measurements

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        arms, n = group_by_seed(checkpoints), self.settings.n_depths * self.settings.n_samples
        for arm in arms:
            seeds = [measurements[member] for member in arm["checkpoints"]]
            arm["lengths"] = [over_seeds(each, n) for each in zip(*seeds, strict=True)]
        return {"arms": arms, "measurements": measurements}

    def report(self, record: dict[str, Any]) -> Report:
        arms, settings = record["arms"], record["settings"]
        names = [length_name(record, length) for length in settings["lengths"]]
        n_depths, n_samples = len(settings["depths"]), settings["n_samples"]

        def rows(cell: Callable[[dict[str, Any]], str], shown: Callable[[str], str] = literal) -> list[list[str]]:
            """A row for each arm, a cell for each length."""
            return [[shown(arm["label"]), str(len(arm["checkpoints"])), *map(cell, arm["lengths"])] for arm in arms]

        head = ["configuration", "seeds", *(f"{name} tokens" for name in names)]
        parts = [
            "# Needle in a haystack",
            "![accuracy by depth and length](needle.png)",
            "Exact-match accuracy:",
            markdown_table(head, rows(_accuracy)),
            "Log-likelihood of the answer, nats per token:",
            markdown_table(head, rows(_nats)),
            DEFINITION.format(n_depths=n_depths, n_samples=n_samples, n=n_depths * n_samples),
        ]
        title = "Exact match, its 95 % interval, and nats per token of the answer"
        printed = rows(lambda own: f"{_accuracy(own)}\n{_nats(own)}".replace(" [", "\n["), str)
        head = ["configuration", "seeds", *(f"{name}\ntokens" for name in names)]
        return Report(Table(title, head, printed), parts, {"needle.png": lambda: plot(record)})


def measure(model: LanguageModel, haystack: Haystack, length: int, settings: NeedleSettings) -> dict[str, Any]:
    """Score samples of `length` tokens at each depth.

    Sample j at depth number i depends only on the seed, the length, i and j. So all models with one tokenizer get the
    same samples.

    Returns:
        {length, accuracy, nats_per_token, by_depth}; accuracy is the share of exact matches, nats are log-likelihoods.
        `by_depth` has {depth, mean_depth, matches, samples, nats_per_token}; `mean_depth` is that of the needles, which
        stand at the end of a sentence nearby.

    Raises:
        UserError: A forward pass does not fit into the device's memory.
    """
    depths, n_samples = settings.depths, settings.n_samples
    places = [(i, j) for i in range(len(depths)) for j in range(n_samples)]
    at_once = max(1, BATCH_TOKENS // length)
    scores: list[tuple[float, bool, float, int]] = []  # depth, match, log-likelihood, tokens of the answer
    for first in range(0, len(places), at_once):
        drawn = [(depths[i], generator(settings.seed, EVALUATION, length, (i << 32) + j))
                 for i, j in places[first : first + at_once]]  # fmt: skip
        samples = [haystack.sample(length, asked, random, held_out=True) for asked, random in drawn]
        matches, values = (each.tolist() for each in score(model, samples))
        scores += zip((own.depth for own in samples), matches, values, (own.n_answer for own in samples), strict=True)
    depth, match, log_likelihood, n_answer = (
        np.array(values).reshape(len(depths), n_samples) for values in zip(*scores, strict=True)
    )
    return {
        "length": length,
        "accuracy": float(match.mean()),
        "nats_per_token": float(log_likelihood.sum() / n_answer.sum()),
        "by_depth": [
            {"depth": float(asked), "mean_depth": float(depth[i].mean()), "matches": int(match[i].sum()),
             "samples": n_samples, "nats_per_token": float(log_likelihood[i].sum() / n_answer[i].sum())}
            for i, asked in enumerate(depths)
        ],
    }  # fmt: skip


@torch.inference_mode()
def score(model: LanguageModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """For samples of one length: (B,) whether the answer is matched, and (B,) its log-likelihood in nats."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    n_answer = torch.tensor([sample.n_answer for sample in samples], device=device)
    most = int(n_answer.max())
    advice = "leave the longest of --lengths out, or choose another --device"
    with enough_memory(len(samples), tokens.shape[1] - 1, device, advice):
        logits = model.model(tokens[:, :-1], n_logits=most).float()  # (B, longest answer, V)
    targets = tokens[:, -most:]
    counted = torch.arange(most, device=device) >= most - n_answer[:, None]
    match = ((logits.argmax(-1) == targets) | ~counted).all(-1)
    of_targets = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return match.cpu(), torch.where(counted, of_targets, 0).sum(-1).cpu()


def over_seeds(seeds: tuple[dict[str, Any], ...], n: int) -> dict[str, Any]:
    """An arm's means at one length, from the scores of each seed on the same `n` samples."""
    accuracy = Summary(tuple(own["accuracy"] for own in seeds))
    assert accuracy.mean is not None
    return {
        "length": seeds[0]["length"],
        "accuracy": accuracy.mean,
        "accuracy_sd": accuracy.sd,
        "interval_95": wilson(accuracy.mean, n),
        "nats_per_token": float(np.mean([own["nats_per_token"] for own in seeds])),
    }


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share in n trials (Wilson 1927)."""
    centre = share + Z**2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def _accuracy(own: dict[str, Any]) -> str:
    sd, (low, high) = own["accuracy_sd"], own["interval_95"]
    spread = f" ± {sd:.3f}" if sd is not None else ""
    return f"{own['accuracy']:.3f}{spread} [{low:.3f}, {high:.3f}]"


def _nats(own: dict[str, Any]) -> str:
    return minus(f"{own['nats_per_token']:.3f}".replace("-0.000", "0.000"))


def plot(record: dict[str, Any]) -> Figure:
    """Heat maps of the accuracy, a panel for each arm: the first depth on top, the shortest length on the left."""
    arms, lengths, depths = record["arms"], record["settings"]["lengths"], record["settings"]["depths"]
    columns = min(len(arms), COLUMNS, max(1, MOST_COLUMNS // len(lengths)))
    n_rows = -(-len(arms) // columns)
    numbers = columns * len(lengths) <= MOST_CELLS and len(depths) <= FEW_DEPTHS
    height = 0.9 + n_rows * (0.5 + 0.16 * max(5, len(depths)))
    figure, grid = plt.subplots(n_rows, columns, figsize=(TEXT, height), squeeze=False)
    axes = [*grid.flat][: len(arms)]
    for ax in [*grid.flat][len(arms) :]:
        ax.remove()
    columns_shown = range(0, len(lengths), max(1, round(len(lengths) / 6)))
    rows_shown = range(0, len(depths), max(1, round((len(depths) - 1) / 10)))
    for number, (ax, arm) in enumerate(zip(axes, arms, strict=True)):
        seeds = [record["measurements"][member] for member in arm["checkpoints"]]
        shares = [
            [[own["matches"] / own["samples"] for own in scores["by_depth"]] for scores in seed] for seed in seeds
        ]
        picture = heat_map(ax, np.mean(shares, axis=0).T, 1.0, numbers)  # the mean of (seeds, lengths, depths)
        n_seeds = f" ({len(seeds)}\N{NO-BREAK SPACE}seeds)" if len(seeds) > 1 else ""
        ax.set_title(textwrap.fill(legend_name(arm["label"]) + n_seeds, 75 // columns))
        ax.set_xticks(columns_shown, [length_name(record, lengths[i]).replace(" ", "\n") for i in columns_shown])
        ax.set_yticks(rows_shown, [f"{100 * depths[i]:.0f}" for i in rows_shown])
        ax.spines[:].set_visible(False)
        is_first, is_lowest = number % columns == 0, number + columns >= len(arms)  # in its row; in its column
        ax.tick_params(length=0, labelleft=is_first, labelbottom=is_lowest)
    times = ", and in training lengths" if "×" in length_name(record, lengths[0]) else ""
    figure.supxlabel(f"length (tokens{times})", fontsize=8)
    figure.supylabel("depth of the needle (% of the text)", fontsize=8)
    figure.colorbar(picture, ax=axes, label="exact-match accuracy", ticks=np.linspace(0, 1, 6), pad=0.02, aspect=30)
    return figure


def length_name(record: dict[str, Any], length: int) -> str:
    """`1,024 (4×)`; without the multiple if the models were trained at different lengths."""
    trained = {own["training_length"] for own in record["checkpoints"]}
    times = f" ({length / trained.pop():g}×)" if len(trained) == 1 else ""
    return f"{length:,}{times}"

"""`anlit needle`: how often models find a number in a long text, by depth and length.

A match means that greedy decoding after the question gives the 7 digits, in the tokens of the tokenizer. This needs no
decoding: greedy decoding gives the answer if and only if each of its tokens is the argmax given the question and the
answer's tokens before it. So one forward pass over the sample with its answer is enough. (Other tokens that spell the
same digits are no match; a tokenizer writes a number in one way.)
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from anlit.data.module import TokenShards
from anlit.data.needle import EVALUATION, Haystack, Sample
from anlit.data.order import generator
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import NeedleSettings
from anlit.nn.models.runtime import allow_compiled_kernels, enough_memory
from anlit.reporting.figure import TEXT, heat_map, legend_name, panels
from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import literal, minus, say
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint

BATCH_TOKENS = 1 << 14  # in a forward pass, unless one sample is longer
Z = 1.959964  # quantile of the normal distribution for 95 %
COLUMNS = 3  # panels in a row
MOST_CELLS = 12  # in a row, over all panels, that show their numbers
MOST_TICKS = 6
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
        plan, self.haystack = super().plan(checkpoints, data), Haystack(data, "val")
        for length in self.lengths:
            self.haystack.check(length)
        return plan | {"depths": depths(self.settings.n_depths)}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        measurements = []
        n_samples = self.settings.n_depths * self.settings.n_samples
        for length in self.lengths:
            allow_compiled_kernels(checkpoint.model.model, n_samples * length, length)
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
        n_depths, n_samples = len(settings["depths"]), settings["n_samples"]

        def rows(
            cell: Callable[[dict[str, Any]], str], shown: Callable[[str], str] = literal
        ) -> list[list[str]]:
            """A row for each arm, a cell for each length."""
            return [
                [shown(arm["label"]), str(len(arm["checkpoints"])), *map(cell, arm["lengths"])]
                for arm in arms
            ]

        head = [
            "configuration",
            "seeds",
            *(f"{length_name(record, n)}\ntokens" for n in settings["lengths"]),
        ]
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
        return Report(Table(title, head, printed), parts, {"needle.png": lambda: plot(record)})


def depths(n: int) -> list[float]:
    """`n` depths from 0 to 1; a single one is in the middle."""
    return [i / (n - 1) for i in range(n)] if n > 1 else [0.5]


def measure(
    model: LanguageModel, haystack: Haystack, length: int, settings: NeedleSettings
) -> dict[str, Any]:
    """Score samples of `length` tokens at each depth.

    Sample j at depth number i depends only on the seed, the length, i and j. So all models with one tokenizer get the
    same samples.

    Returns {length, accuracy, nats_per_token, by_depth}: the share of exact matches, and log-likelihoods. `by_depth`
    has {depth, mean_depth, matches, samples, nats_per_token}; `mean_depth` is that of the needles, which stand at the
    end of a sentence nearby. UserError if a forward pass does not fit into the device's memory.
    """
    asked, n_samples = depths(settings.n_depths), settings.n_samples
    places, at_once = (
        list(product(range(len(asked)), range(n_samples))),
        max(1, BATCH_TOKENS // length),
    )
    scores: list[
        tuple[float, bool, float, int]
    ] = []  # depth, match, log-likelihood, tokens of the answer
    for first in range(0, len(places), at_once):
        samples = [
            haystack.sample(
                length, asked[i], generator(settings.seed, EVALUATION, length, (i << 32) + j), True
            )
            for i, j in places[first : first + at_once]
        ]
        matches, values = (each.tolist() for each in score(model, samples))
        scores += zip(
            (own.depth for own in samples),
            matches,
            values,
            (own.n_answer for own in samples),
            strict=True,
        )
    depth, match, log_likelihood, n_answer = (
        np.array(scores).reshape(len(asked), n_samples, 4).transpose(2, 0, 1)
    )
    by_depth = zip(
        asked, depth.mean(1), match.sum(1), log_likelihood.sum(1) / n_answer.sum(1), strict=True
    )
    return {
        "length": length,
        "accuracy": float(match.mean()),
        "nats_per_token": float(log_likelihood.sum() / n_answer.sum()),
        "by_depth": [
            {"depth": place, "mean_depth": float(mean), "matches": int(matches), "samples": n_samples,
             "nats_per_token": float(nats)}
            for place, mean, matches, nats in by_depth
        ],
    }  # fmt: skip


@torch.inference_mode()
def score(model: LanguageModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """For samples of one length: (B,) whether the answer is matched, and (B,) its log-likelihood in nats."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    n_answer = torch.tensor([sample.n_answer for sample in samples], device=device)
    most = max(sample.n_answer for sample in samples)
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
    accuracy, nats = (
        np.array([own[name] for own in seeds]) for name in ("accuracy", "nats_per_token")
    )
    mean, sd = float(accuracy.mean()), float(accuracy.std(ddof=1)) if len(seeds) > 1 else None
    return {"length": seeds[0]["length"], "accuracy": mean, "accuracy_sd": sd, "interval_95": wilson(mean, n),
            "nats_per_token": float(nats.mean())}  # fmt: skip


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share in n trials (Wilson 1927)."""
    centre = share + Z**2 / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, (centre - half) / (1 + Z**2 / n)), min(1.0, (centre + half) / (1 + Z**2 / n))


def _accuracy(own: dict[str, Any]) -> str:
    sd, (low, high) = own["accuracy_sd"], own["interval_95"]
    spread = f" ± {sd:.3f}" if sd is not None else ""
    return f"{own['accuracy']:.3f}{spread} [{low:.3f}, {high:.3f}]"


def _nats(own: dict[str, Any]) -> str:
    return minus(f"{own['nats_per_token']:.3f}".replace("-0.000", "0.000"))


def plot(record: dict[str, Any]) -> Figure:
    """Heat maps of the accuracy, a panel for each arm: the first depth on top, the shortest length on the left."""
    arms, lengths, depths = (
        record["arms"],
        record["settings"]["lengths"],
        record["settings"]["depths"],
    )
    columns = min(len(arms), COLUMNS)
    figure, axes = panels(len(arms), columns, TEXT / columns, 0.5 + 0.16 * max(5, len(depths)))
    shown = range(0, len(lengths), max(1, round(len(lengths) / MOST_TICKS)))
    for number, (ax, arm) in enumerate(zip(axes, arms, strict=True)):
        seeds = [record["measurements"][member] for member in arm["checkpoints"]]
        shares = [
            [[at["matches"] / at["samples"] for at in own["by_depth"]] for own in seed]
            for seed in seeds
        ]
        mean = np.mean(shares, axis=0)  # of (seeds, lengths, depths)
        picture = heat_map(ax, mean.T, 1.0, numbers=columns * len(lengths) <= MOST_CELLS)
        n_seeds = f" ({len(seeds)}\N{NO-BREAK SPACE}seeds)" if len(seeds) > 1 else ""
        ax.set_title(textwrap.fill(legend_name(arm["label"]) + n_seeds, 75 // columns))
        ax.set_xticks(shown, [length_name(record, lengths[i]).replace(" ", "\n") for i in shown])
        ax.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        ax.grid(False)
        ax.spines[:].set_visible(False)
        is_first, is_lowest = (
            number % columns == 0,
            number + columns >= len(arms),
        )  # in its row; in its column
        ax.tick_params(length=0, labelleft=is_first, labelbottom=is_lowest)
    figure.supxlabel("length (tokens)", fontsize=8)
    figure.supylabel("depth of the needle (% of the text)", fontsize=8)
    figure.colorbar(
        picture,
        ax=axes,
        label="exact-match accuracy",
        ticks=np.linspace(0, 1, 6),
        pad=0.02,
        aspect=30,
    )
    return figure


def length_name(record: dict[str, Any], length: int) -> str:
    """`1,024 (4×)`; without the multiple if the models were trained at different lengths."""
    trained = {own["training_length"] for own in record["checkpoints"]}
    times = f" ({length / trained.pop():g}×)" if len(trained) == 1 else ""
    return f"{length:,}{times}"

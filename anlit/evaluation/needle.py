"""`anlit needle`: how often models find a number in a long text, by depth and length.

A match means that greedy decoding after the question gives the 7 digits, in the tokenizer's tokens.
This needs no decoding. Each token of the answer must be the argmax after the question and the
answer's earlier tokens. So a forward pass over the sample with its answer is enough. Other tokens
that spell the same digits do not match. A tokenizer writes a number in a single way.
"""

import math
import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from anlit.compare.statistics import Summary
from anlit.data.module import TokenShards
from anlit.data.needle import EVALUATION, Haystack, Sample
from anlit.data.order import generator
from anlit.evaluation.runner import Evaluation, Report, group_by_seed
from anlit.evaluation.settings import NeedleSettings
from anlit.nn.models.runtime import allow_compiled_kernels, enough_memory
from anlit.reporting.figure import TEXT_WIDTH, heat_map, legend_name, panels
from anlit.reporting.page import listed
from anlit.reporting.table import Table, markdown_table
from anlit.reporting.text import literal, minus, say
from anlit.training.language_model import LanguageModel
from anlit.training.load_model import Checkpoint

MAX_SAMPLE_TOKENS = 1 << 14
"""Tokens in a forward pass at most, unless a sample is longer."""
Z_95 = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""
MAX_COLUMNS = 3
"""Panels in a row."""
TITLE_CHARACTERS = 75
"""Characters of the titles in a row, over all panels."""
MAX_NUMBERED_CELLS = 12
"""Cells in a row over all panels. If there are more, cells show no numbers."""
TABLE_TITLE = "Exact match, its 95 % interval, log-likelihood of the answer (nats per token)"
NEEDLE_NOTE = """\
Accuracy is the share of samples for which greedy decoding gives exactly the 7 digits, averaged over
{n_depths} depths with {n_samples} samples each. Brackets have the 95 % interval (Wilson) for {n}
samples. All seeds and all configurations with the same tokenizer get the same samples. ± is the
standard deviation over seeds. The log-likelihood of the answer's tokens is given all tokens before
them: 0 is certainty, −ln V is guessing among all V tokens. It differs between configurations even
if their accuracy is 0."""


class Needle(Evaluation):
    """How often a number is found in a long text, by depth and length."""

    name = page = "needle"
    settings: NeedleSettings
    haystack: Haystack

    def plan(self, checkpoints: list[Checkpoint], data: TokenShards) -> dict[str, Any]:
        """Choose lengths and depths; UserError if the validation split cannot give such samples."""
        plan = super().plan(checkpoints, data)
        self.haystack = Haystack(data, "val")
        for length in self.lengths:
            self.haystack.check(length)
        return plan | {"depths": spread_depths(self.settings.n_depths)}

    def measure(self, checkpoint: Checkpoint, data: TokenShards) -> list[dict[str, Any]]:
        """Measure the accuracy at each length, see `measure_accuracy`."""
        measurements = []
        n_samples = self.settings.n_depths * self.settings.n_samples
        for length in self.lengths:
            allow_compiled_kernels(checkpoint.model.model, n_samples * length, length)
            result = measure_accuracy(checkpoint.model, self.haystack, length, self.settings)
            measurements.append(result)
            say(f"{checkpoint.file}: accuracy {result['accuracy']:.3f} at {length:,}")
        return measurements

    def record(self, checkpoints: list[Checkpoint], measurements: list[Any]) -> dict[str, Any]:
        arms, notes = group_by_seed(checkpoints)
        n_samples = self.settings.n_depths * self.settings.n_samples
        for arm in arms:
            seeds = [measurements[index] for index in arm["checkpoints"]]
            arm["lengths"] = [
                average_seeds(results, n_samples) for results in zip(*seeds, strict=True)
            ]
        return {"arms": arms, "measurements": measurements, "notes": notes}

    def report(self, record: dict[str, Any]) -> Report:
        n_depths = len(record["settings"]["depths"])
        n_samples = record["settings"]["n_samples"]
        head = ["configuration", "seeds"]
        for length in record["settings"]["lengths"]:
            head.append(f"{length_name(record, length)}\ntokens")
        rows = []
        for arm in record["arms"]:
            cells = map(_accuracy_and_nats, arm["lengths"])
            rows.append([arm["label"], str(len(arm["checkpoints"])), *cells])
        paragraphs = [
            "# Needle in a haystack",
            "![accuracy by depth and length](needle.png)",
            f"{TABLE_TITLE}:",
            markdown_table(head, [[literal(label), *cells] for label, *cells in rows]),
            NEEDLE_NOTE.format(n_depths=n_depths, n_samples=n_samples, n=n_depths * n_samples),
        ]
        notes = record.get("notes", [])
        if notes:
            paragraphs += ["## Notes", listed(notes)]
        table = Table(TABLE_TITLE, head, rows)
        figures = {"needle.png": partial(draw_accuracy, record)}
        return Report([table], paragraphs, figures, [f"note: {note}" for note in notes])


def spread_depths(n: int) -> list[float]:
    """`n` depths from 0 to 1; a single depth is in the middle."""
    if n == 1:
        return [0.5]
    return [i / (n - 1) for i in range(n)]


def measure_accuracy(
    model: LanguageModel, haystack: Haystack, length: int, settings: NeedleSettings
) -> dict[str, Any]:
    """Score samples of `length` tokens at each depth.

    Sample j at depth number i depends only on the seed, the length, i and j. So all models with the
    same tokenizer get the same samples.

    Returns:
        {length, accuracy, nats_per_token, by_depth}: the share of exact matches, and
        log-likelihoods. `by_depth` has {depth, mean_depth, matches, samples, nats_per_token}.
        `mean_depth` is the mean depth of the needles, which stand at the end of a sentence nearby.

    Raises:
        UserError: A forward pass does not fit into the device's memory.
    """
    depths = spread_depths(settings.n_depths)
    n_samples = settings.n_samples
    scores = _score_all_samples(model, haystack, length, settings)
    table = np.array(scores).reshape(len(depths), n_samples, 4)
    sample_depths, is_match, log_likelihood, n_answer = table.transpose(2, 0, 1)
    mean_depths = sample_depths.mean(1)
    matches = is_match.sum(1)
    nats_per_token = log_likelihood.sum(1) / n_answer.sum(1)
    by_depth = []
    for i, depth in enumerate(depths):
        by_depth.append({
            "depth": depth,
            "mean_depth": float(mean_depths[i]),
            "matches": int(matches[i]),
            "samples": n_samples,
            "nats_per_token": float(nats_per_token[i]),
        })  # fmt: skip
    return {
        "length": length,
        "accuracy": float(is_match.mean()),
        "nats_per_token": float(log_likelihood.sum() / n_answer.sum()),
        "by_depth": by_depth,
    }


def _score_all_samples(
    model: LanguageModel, haystack: Haystack, length: int, settings: NeedleSettings
) -> list[tuple[float, bool, float, int]]:
    """Score the samples of each depth in turn, several in a forward pass.

    Returns:
        (depth, match, log-likelihood in nats, tokens of the answer) for each sample.
    """
    depths = spread_depths(settings.n_depths)
    positions = list(product(range(len(depths)), range(settings.n_samples)))
    at_once = max(1, MAX_SAMPLE_TOKENS // length)
    scores = []
    for first in range(0, len(positions), at_once):
        samples = []
        for i, j in positions[first : first + at_once]:
            # The two numbers in one key; j is below 2³².
            random = generator(settings.seed, EVALUATION, length, (i << 32) + j)
            samples.append(haystack.sample(length, depths[i], random, held_out=True))
        is_match, log_likelihoods = score_answers(model, samples)
        for sample, match, nats in zip(
            samples, is_match.tolist(), log_likelihoods.tolist(), strict=True
        ):
            scores.append((sample.depth, match, nats, sample.n_answer))
    return scores


@torch.inference_mode()
def score_answers(model: LanguageModel, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Whether each answer is matched, (B,), and its log-likelihood in nats, (B,).

    The samples have a common length.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).to(device)
    n_answer = torch.tensor([sample.n_answer for sample in samples], device=device)
    longest = max(sample.n_answer for sample in samples)
    advice = "leave the longest of --lengths out, or choose another --device"
    with enough_memory(len(samples), tokens.shape[1] - 1, device, advice):
        logits = model.model(tokens[:, :-1], n_logits=longest).float()  # (B, longest answer, V)
    targets = tokens[:, -longest:]
    is_answer = torch.arange(longest, device=device) >= longest - n_answer[:, None]
    is_match = ((logits.argmax(-1) == targets) | ~is_answer).all(-1)
    log_likelihoods = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return is_match.cpu(), torch.where(is_answer, log_likelihoods, 0).sum(-1).cpu()


def average_seeds(seeds: tuple[dict[str, Any], ...], n_samples: int) -> dict[str, Any]:
    """Average an arm's scores at a length; each seed has scores on the same samples."""
    accuracy = Summary([seed["accuracy"] for seed in seeds])
    nats = Summary([seed["nats_per_token"] for seed in seeds])
    assert accuracy.mean is not None, "every seed has an accuracy"
    return {
        "length": seeds[0]["length"],
        "accuracy": accuracy.mean,
        "accuracy_sd": accuracy.sd,
        "interval_95": wilson_interval(accuracy.mean, n_samples),
        "nats_per_token": nats.mean,
    }


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share in n trials (Wilson 1927)."""
    centre = share + Z_95**2 / (2 * n)
    half_width = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    scale = 1 + Z_95**2 / n
    return max(0.0, (centre - half_width) / scale), min(1.0, (centre + half_width) / scale)


def _accuracy_and_nats(result: dict[str, Any]) -> str:
    """A cell of the table, in three lines for the terminal."""
    low, high = result["interval_95"]
    sd = "" if result["accuracy_sd"] is None else f" ± {result['accuracy_sd']:.3f}"
    nats = f"{result['nats_per_token']:.3f}".replace("-0.000", "0.000")  # a zero has no sign
    return f"{result['accuracy']:.3f}{sd}\n[{low:.3f}, {high:.3f}]\n{minus(nats)}"


def draw_accuracy(record: dict[str, Any]) -> Figure:
    """Draw a heat map of the accuracy for each arm.

    The first depth is on top, the shortest length on the left.
    """
    arms = record["arms"]
    lengths = record["settings"]["lengths"]
    depths = record["settings"]["depths"]
    n_columns = min(len(arms), MAX_COLUMNS)
    height = 0.5 + 0.16 * max(5, len(depths))  # inches
    figure, all_axes = panels(len(arms), n_columns, TEXT_WIDTH / n_columns, height)
    tick_labels = [length_name(record, length).replace(" ", "\n") for length in lengths]
    has_numbers = n_columns * len(lengths) <= MAX_NUMBERED_CELLS
    for number, (axes, arm) in enumerate(zip(all_axes, arms, strict=True)):
        image = heat_map(axes, _mean_shares(record, arm).T, top=1.0, numbers=has_numbers)
        n_seeds = len(arm["checkpoints"])
        seeds = f" ({n_seeds}\N{NO-BREAK SPACE}seeds)" if n_seeds > 1 else ""
        title = legend_name(arm["label"]) + seeds
        axes.set_title(textwrap.fill(title, TITLE_CHARACTERS // n_columns))
        axes.set_xticks(range(len(lengths)), tick_labels)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        axes.grid(False)
        axes.spines[:].set_visible(False)
        is_first_in_row = number % n_columns == 0
        is_lowest_in_column = number + n_columns >= len(arms)
        axes.tick_params(length=0, labelleft=is_first_in_row, labelbottom=is_lowest_in_column)
    figure.supxlabel("length (tokens)", fontsize=8)
    figure.supylabel("depth of the needle (% of the text)", fontsize=8)
    bar: dict[str, Any] = {"label": "exact-match accuracy", "ticks": np.linspace(0, 1, 6)}
    figure.colorbar(image, ax=all_axes, pad=0.02, aspect=30, **bar)
    return figure


def _mean_shares(record: dict[str, Any], arm: dict[str, Any]) -> np.ndarray:
    """The share of matches, mean over seeds, (lengths, depths)."""
    lengths = record["settings"]["lengths"]
    shares = np.zeros((len(lengths), len(record["settings"]["depths"])))
    for index in arm["checkpoints"]:
        for row, result in zip(shares, record["measurements"][index], strict=True):
            for i, depth in enumerate(result["by_depth"]):
                row[i] += depth["matches"] / depth["samples"]
    return shares / len(arm["checkpoints"])


def length_name(record: dict[str, Any], length: int) -> str:
    """`1,024 (4×)`; without the multiple if the models were trained at different lengths."""
    training_lengths = {model["training_length"] for model in record["checkpoints"]}
    if len(training_lengths) > 1:
        return f"{length:,}"
    (training_length,) = training_lengths
    return f"{length:,} ({length / training_length:g}×)"

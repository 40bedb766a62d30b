"""Norms and scores inside a model: against sums token by token in float64, and known laws."""

import copy
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from scipy import stats
from torch import nn
from torch.nn.functional import silu

from anlit import GPT, NGPT, AnGPT, ScaleInvariant
from anlit.data.batch import Batch, batch_from_blocks
from anlit.evaluation.diagnose import Diagnose
from anlit.evaluation.hidden_norms import draw_norms, measure_norms, norms_table
from anlit.evaluation.score_distribution import (
    BIN_WIDTH,
    LARGEST_SCORE,
    ScoreSums,
    measure_scores,
)
from anlit.evaluation.settings import DiagnoseSettings
from anlit.nn.attention.statistics import Range, ranges
from anlit.nn.layers.norms import nu_activation, nu_linear
from anlit.nn.models.gpt import GPTBlock, GPTDecoder
from anlit.training.load_model import draw_anew
from tests.data.prepared import VOCABULARY
from tests.evaluation.saved import LENGTH as LENGTH_OF_RUN
from tests.evaluation.saved import load_with_data, make_run, small
from tests.nn.models.tiny import tiny

LENGTH = 24
N_SEQUENCES = 3
CPU = torch.device("cpu")
Record = dict[str, Any]


def batches(vocabulary: int) -> list[Batch]:
    """Two batches of random tokens; token 0 ends a document."""
    generator = np.random.default_rng(5)
    result = []
    for _ in range(2):
        blocks = generator.integers(vocabulary, size=(N_SEQUENCES, LENGTH + 1))
        blocks[:, 9] = 0
        result.append(batch_from_blocks(blocks, end_of_document=0))
    return result


def small_decoder(architecture: Any, **settings: Any) -> Any:
    return small(architecture, context_length=LENGTH, **settings).eval().model


def vectors_of_angpt(block: Any, h: torch.Tensor, *arguments: Any) -> dict[str, torch.Tensor]:
    """The vectors of an anGPT block, written out."""
    outputs: list[torch.Tensor] = []
    handle = block.attention.register_forward_hook(lambda *call: outputs.append(call[-1]))
    h_A = block.attend(h, *arguments)
    handle.remove()
    (output,) = outputs
    average = output.transpose(1, 2).flatten(2)
    middle = block.interpolate(h, h_A, block.alpha_A())
    d = block.W_u.in_features
    f = block.W_u.out_features
    u = block.W_u.factor * middle @ block.W_u.weight.T
    z = block.W_z.factor * middle @ block.W_z.weight.T
    return {
        "h": h,
        "attention_average": average / math.sqrt(block.n_heads),
        "h_A": h_A,
        "mlp_hidden": nu_activation(nu_linear(d, f)) * u * silu(z),
        "h_M": block.mlp(middle),
    }


@torch.no_grad()
def test_norms_are_equal_to_a_block_written_out() -> None:
    decoder = small_decoder(AnGPT, n_layers=2).double()
    text = batches(decoder.embedding.num_embeddings)
    lengths_by_name_and_layer: dict[tuple[str, int], list[float]] = defaultdict(list)

    def read(layer: int, block: Any, arguments: Any) -> None:
        for name, vectors in vectors_of_angpt(block, *arguments).items():
            lengths = vectors.norm(dim=-1).flatten()
            lengths_by_name_and_layer[name, layer] += lengths.tolist()

    norms = measure_norms(decoder, text, CPU)

    for layer, block in enumerate(decoder.blocks):
        block.register_forward_pre_hook(partial(read, layer))
    for batch in text:
        decoder(batch.tokens, batch.document_ids)
    assert len(lengths_by_name_and_layer) == 5 * 2
    for (name, layer), lengths in lengths_by_name_and_layer.items():
        mean = norms[name]["mean"][layer]
        deviation = norms[name]["standard_deviation"][layer]
        assert len(lengths) == 2 * N_SEQUENCES * LENGTH
        assert mean == pytest.approx(np.mean(lengths), rel=1e-9), name
        assert deviation == pytest.approx(np.std(lengths), rel=1e-6), name
    assert len(norms["h"]["mean"]) == 3, "the last is the head's input"


@pytest.mark.parametrize("architecture", [GPT, NGPT, AnGPT])
def test_every_architecture_has_all_norms(architecture: Any) -> None:
    decoder = small_decoder(architecture, n_layers=2)
    text = batches(decoder.embedding.num_embeddings)

    norms = measure_norms(decoder, text, CPU)

    assert list(norms) == ["h", "attention_average", "h_A", "mlp_hidden", "h_M"]
    if architecture is NGPT:
        after_the_blocks = norms["h"]["mean"][1:]
        assert after_the_blocks == pytest.approx([1, 1], abs=1e-5)


def test_a_wide_untrained_angpt_has_the_assumed_norms_of_its_mlp() -> None:
    """The constants are exact in the limit of a wide model, here within 3 %. h has norm 1."""
    settings = {
        "vocab_size": 64,
        "context_length": LENGTH,
        "d_model": 512,
        "n_layers": 1,
        "n_heads": 4,
        "alpha_init": 1e-6,
    }
    decoder = AnGPT(**settings).model.eval()

    norms = measure_norms(decoder, batches(64), CPU)

    (mlp_hidden,) = norms["mlp_hidden"]["mean"]
    (h_M,) = norms["h_M"]["mean"]
    (h_A,) = norms["h_A"]["mean"]
    assert norms["h"]["mean"] == pytest.approx([1, 1], abs=1e-4)
    assert mlp_hidden == pytest.approx(1, abs=0.03)
    assert h_M == pytest.approx(1, abs=0.03)
    assert h_A < 0.9, "an average of values is shorter than a value"


class PairsOfHead:
    """The scores of all pairs of a query and a visible key, for a head."""

    def __init__(self) -> None:
        self.scores: list[np.ndarray] = []
        self.distances: list[np.ndarray] = []
        self.query_variances: list[float] = []

    def read(self, q: np.ndarray, k: np.ndarray, ids: np.ndarray) -> None:
        """Add the pairs of q and k, (B, T, D)."""
        *_, d_head = q.shape
        for row, i in np.ndindex(*ids.shape):
            is_visible = ids[row, : i + 1] == ids[row, i]
            keys = np.flatnonzero(is_visible)
            products = k[row, keys] @ q[row, i]
            scores = products / math.sqrt(d_head)
            self.scores.append(scores)
            self.distances.append(i - keys)
            if len(keys) > 1:
                self.query_variances.append(scores.var(ddof=1))

    def moments(self) -> dict[str, float]:
        scores = np.concatenate(self.scores)
        variance_within_query = np.mean(self.query_variances)
        return {
            "mean": scores.mean(),
            "standard_deviation": scores.std(),
            "skewness": stats.skew(scores),
            "excess_kurtosis": stats.kurtosis(scores),
            "deviation_within_query": math.sqrt(variance_within_query),
        }

    def scores_at_distances(self, first: int, end: int) -> np.ndarray:
        t = np.concatenate(self.distances)
        is_inside = (t >= first) & (t < end)
        return np.concatenate(self.scores)[is_inside]


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("masked", [True, False], ids=["documents", "single text"])
@torch.no_grad()
def test_scores_are_equal_to_products_pair_by_pair(masked: bool, head: int) -> None:
    """q·k/√D without the mechanism, over all pairs of a query and a visible key."""
    decoder = small_decoder(GPT, attention=ScaleInvariant()).double()
    decoder.document_masking = masked
    text = batches(decoder.embedding.num_embeddings)
    pairs = PairsOfHead()

    (layer,) = measure_scores(decoder, text, CPU, LENGTH)

    for batch in text:
        q, k = queries_and_keys(decoder, batch)
        ids = np.zeros((N_SEQUENCES, LENGTH))
        if masked:
            ids = batch.document_ids.numpy()
        pairs.read(q[:, head], k[:, head], ids)
    for name, value in pairs.moments().items():
        assert layer[name][head] == pytest.approx(value), name
    near = pairs.scores_at_distances(1, 10)
    moments = layer["ranges"]["1_to_10"]
    assert moments["mean"][head] == pytest.approx(near.mean())
    assert moments["standard_deviation"][head] == pytest.approx(near.std())


def queries_and_keys(decoder: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """q and k of the first layer, (B, H, T, D) each."""
    inputs: list[torch.Tensor] = []
    attention = decoder.blocks[0].attention
    handle = attention.register_forward_pre_hook(lambda _, arguments: inputs.extend(arguments))
    decoder(batch.tokens, batch.document_ids)
    handle.remove()
    q, k, *_ = inputs
    return q.numpy(), k.numpy()


NORMAL_LAW = {
    "mean": (0, 1),
    "standard_deviation": (1, 1),
    "deviation_within_query": (1, 1),
    "skewness": (0, math.sqrt(6)),
    "excess_kurtosis": (0, math.sqrt(24)),
}
"""Each moment, and the factor of its standard error."""


def normal_density(edges: np.ndarray) -> np.ndarray:
    shares = np.diff(stats.norm.cdf(edges))
    return shares / np.diff(edges)


def test_normal_scores_have_the_moments_and_the_density_of_the_normal_law() -> None:
    """5 standard errors of 2 million scores; keys ahead and a third of the others are invisible."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(10, 2, 100, 1000, generator=generator)
    scores[..., ::3] = -math.inf
    is_ahead = torch.ones(100, 1000).triu(901) > 0
    scores = scores.masked_fill(is_ahead, -math.inf)
    sums = ScoreSums(2, ranges(999), CPU)

    sums.add(scores)

    results = sums.results()
    n_scores_of_head = 10 * 100 * 630
    for name, (value, error_factor) in NORMAL_LAW.items():
        error = error_factor / math.sqrt(n_scores_of_head)
        assert results[name] == pytest.approx([value, value], abs=5 * error), name
    density = np.array(results["density"])
    edges = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, len(density) + 1)
    expected_density = normal_density(edges)
    largest_share = BIN_WIDTH * expected_density.max()
    error = math.sqrt(largest_share / (2 * n_scores_of_head)) / BIN_WIDTH
    assert density == pytest.approx(expected_density, abs=5 * error)
    assert density.sum() * BIN_WIDTH == pytest.approx(1)
    assert results["share_outside"] == pytest.approx(0, abs=1e-9)


def test_scores_beyond_the_histogram_are_counted() -> None:
    invisible = -math.inf
    first_query = [0.0, invisible]
    second_query = [100.0, 0.0]
    scores = torch.tensor([[[first_query, second_query]]])
    sums = ScoreSums(1, [Range(0, 1), Range(1, 10)], CPU)

    sums.add(scores)

    results = sums.results()
    assert results["share_outside"] == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Record:
    """The measurements of a trained and an untrained anGPT."""
    folder = tmp_path_factory.mktemp("runs") / "angpt"
    run = make_run(folder, data, AnGPT, n_layers=2)
    checkpoint, validation = load_with_data(run)
    diagnose = Diagnose(DiagnoseSettings((64, 16), tokens=64))
    diagnose.plan([checkpoint], validation)
    return diagnose.measure(checkpoint, validation)["inside"]


def test_the_untrained_model_has_the_same_settings_and_initial_weights(
    record: Record,
) -> None:
    """The trained weights are far from initial: alpha and s_z differ at least."""
    trained = record["trained"]["norms"]["h"]["mean"]
    untrained = record["untrained"]["norms"]["h"]["mean"]

    assert record["assumes_unit_norms"]
    assert untrained[0] == pytest.approx(1, abs=1e-5)
    assert trained[1] != untrained[1]


class GatedBlock(GPTBlock):
    """Has a parameter of its own, without `reset_parameters`."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.gate = nn.Parameter(torch.ones(config.d_model))

    def forward(self, h: torch.Tensor, *shared: Any) -> torch.Tensor:
        return self.gate * super().forward(h, *shared)


class GatedDecoder(GPTDecoder):
    """Draws its head otherwise than GPT+."""

    block_class = GatedBlock

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with torch.no_grad():
            self.head.weight.fill_(0.25)


class Gated(GPT):
    decoder_class = GatedDecoder


@pytest.mark.parametrize("architecture", [GPT, AnGPT, Gated])
def test_a_model_drawn_anew_has_the_values_of_a_new_model(
    architecture: Any, data: Path, tmp_path: Path
) -> None:
    checkpoint, _ = load_with_data(make_run(tmp_path / "run", data, architecture))
    trained = copy.deepcopy(checkpoint.model.state_dict())

    draw_anew(checkpoint, seed=3)

    settings = {"vocab_size": VOCABULARY, "context_length": LENGTH_OF_RUN, "n_layers": 1}
    new_model = tiny(architecture, seed=3, attention=ScaleInvariant(), **settings)
    expected = new_model.state_dict()
    for name, values in checkpoint.model.state_dict().items():
        assert values.equal(expected[name]), name
        assert not values.equal(trained[name]), name


def test_the_length_is_the_longest_that_training_has_seen(record: Record) -> None:
    """Training had 16 tokens a sequence: the ranges of 64 would reach 100."""
    assert record["length"] == 16
    first_layer, _ = record["trained"]["scores"]
    assert list(first_layer["ranges"]) == ["0_to_1", "1_to_10", "10_to_100"]


def test_the_table_has_a_row_for_each_layer_and_for_the_head() -> None:
    trained = {
        "h": {"mean": [1.0, 2.0]},
        "h_M": {"mean": [3.0]},
    }
    untrained = {
        "h": {"mean": [1.0, 0.5]},
        "h_M": {"mean": [0.75]},
    }

    table = norms_table(trained, untrained, "")

    assert list(table.head) == ["layer", "‖h‖", "‖h_M‖"]
    assert table.rows == [["0", "1 (1)", "3 (0.75)"], ["head", "2 (0.5)", "–"]]


def test_the_axis_of_norms_ends_near_them() -> None:
    """Norms over a factor of 1000: an axis that begins below zero shows none of them."""
    h = {"mean": [0.3, 10.0, 400.0], "standard_deviation": [0.1, 3.0, 100.0]}
    norms = {"h": h}

    figure = draw_norms(norms, norms, False)

    low, high = figure.axes[0].get_ylim()
    plt.close(figure)
    assert 0.01 < low < 0.3
    assert 400 < high < 4000

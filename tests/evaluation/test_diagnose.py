"""`anlit diagnose` on a tiny checkpoint: its numbers against pair-by-pair attention; its files."""

import io
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anlit import GPT, AnGPT, LogN, load_checkpoint
from anlit.commands.evaluations import main
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.diagnose import Diagnose, complete_sequences, statistics_table
from anlit.evaluation.diagnose_figures import last_bin
from anlit.evaluation.settings import DiagnoseSettings
from tests.data.modules import ready
from tests.data.prepared import END, random_tokens, write_prepared
from tests.evaluation.saved import VAL_TOKENS, load_with_data, make_run

HEADS = 2
STRENGTH = 0.8
LOG_N = LogN(STRENGTH, learned="never")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "angpt"
    return make_run(folder, data, AnGPT, n_layers=2, attention=LOG_N)


def measure(run: Path, length: int, tokens: int, masked: bool | None = None) -> dict[str, Any]:
    checkpoint, data = load_with_data(run)
    settings = DiagnoseSettings((length,), tokens=tokens, masking=masked)
    diagnose = Diagnose(settings)
    diagnose.plan([checkpoint], data)
    return diagnose.measure(checkpoint, data)


def spread_sequences(length: int, n_rows: int) -> list[int]:
    """The numbers of `n_rows` sequences from all over the validation split."""
    n_sequences = (VAL_TOKENS - 1) // length
    n_sequences_of_a_row = n_sequences / n_rows
    middles = (np.arange(n_rows) + 0.5) * n_sequences_of_a_row
    numbers: list[int] = middles.astype(int).tolist()
    return numbers


class Query(NamedTuple):
    """The statistics of a query."""

    n_keys: int
    entropy: float
    squared_average: float
    """The square of the average value over the mean square of the values."""


def statistics_of_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Query:
    """The statistics of a query. q: (D,), k and v of its visible keys: (n, D)."""
    n, d_head = k.shape
    scale = STRENGTH * math.log(n) / math.sqrt(d_head)
    weights = (scale * (k @ q)).softmax(0)
    entropy = -(weights * weights.log()).sum()
    average = weights @ v
    mean_square = v.square().sum(-1).mean()
    squared_average = average.square().sum() / mean_square
    return Query(n, entropy.item(), squared_average.item())


class PairByPair:
    """Statistics of attention, computed for each query from its keys, by layer and head."""

    def __init__(self, document_ids: np.ndarray) -> None:
        self.document_ids = document_ids
        self.queries: dict[tuple[int, int], list[Query]] = defaultdict(list)

    def read(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add the queries of a layer. q, k, v: (B, H, T, D)."""
        n_rows, n_heads, length, _ = q.shape
        for row, head, i in np.ndindex(n_rows, n_heads, length):
            ids = self.document_ids[row]
            keys = np.flatnonzero(ids[: i + 1] == ids[i])
            query = q[row, head, i].double()
            visible_keys = k[row, head, keys].double()
            values = v[row, head, keys].double()
            statistics = statistics_of_query(query, visible_keys, values)
            self.queries[layer, head].append(statistics)


def read_sequences(length: int, n_rows: int) -> np.ndarray:
    """Tokens of sequences from all over the validation split, (n_rows, length)."""
    text = random_tokens(VAL_TOKENS, 0).astype(np.int64)
    rows = []
    for number in spread_sequences(length, n_rows):
        start = number * length
        rows.append(text[start : start + length])
    return np.stack(rows)


@torch.no_grad()
def compute_pair_by_pair(run: Path, length: int, n_rows: int, masked: bool) -> PairByPair:
    model = load_checkpoint(str(run), "cpu").model
    tokens = read_sequences(length, n_rows)
    ids = document_ids(tokens, END) if masked else np.zeros_like(tokens)
    statistics = PairByPair(ids)
    for layer, block in enumerate(model.model.blocks):
        block.attention.register_forward_pre_hook(
            lambda _, arguments, layer=layer: statistics.read(layer, *arguments[:3])
        )
    model(torch.from_numpy(tokens), torch.from_numpy(ids))
    return statistics


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "single text"])
def test_statistics_are_equal_to_attention_pair_by_pair(
    run: Path, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 sequences of 40 tokens, longer than in training; by layer, head and bin of n."""
    monkeypatch.setattr("anlit.nn.attention.observe.QUERIES_PER_BLOCK", 7)

    record = measure(run, 40, 101, masked)

    result = record["lengths"][40]
    assert record["masking"] is masked
    assert result["tokens"] == 120
    assert result["edges"] == [1, 2, 4, 8, 16, 32]
    expected = compute_pair_by_pair(run, 40, 3, masked)
    n_layers = 2
    assert len(expected.queries) == n_layers * HEADS
    for (layer, head), queries in expected.queries.items():
        for index, edge in enumerate(result["edges"]):
            in_bin = [query for query in queries if edge <= query.n_keys < 2 * edge]
            assert result["queries"][index] == len(in_bin)
            for name in ("entropy", "squared_average"):
                actual = result["statistics"][name][layer][head][index]
                values = [getattr(query, name) for query in in_bin]
                mean = np.mean(values) if values else math.nan
                assert actual == pytest.approx(mean, rel=1e-4, nan_ok=True, abs=1e-6)
    if masked:
        assert result["queries"][0] > 3, "several documents in a sequence"
    else:
        assert result["queries"][-1] == 3 * 9


@pytest.mark.parametrize(
    ("length", "n_tokens", "sequences"),
    [
        pytest.param(16, 10**6, range(64), id="all"),
        pytest.param(16, 80, spread_sequences(16, 5), id="spread over the split"),
        pytest.param(1000, 1, [0], id="a single sequence"),
    ],
)
def test_every_length_reads_complete_sequences_from_all_over_the_split(
    run: Path, length: int, n_tokens: int, sequences: Sequence[int]
) -> None:
    """The split has 1,028 targets. The last 4 make no sequence."""
    _, data = load_with_data(run)
    text = random_tokens(VAL_TOKENS, 0)

    batches = list(complete_sequences(data, length, n_tokens))

    rows = torch.cat([batch.tokens for batch in batches])
    for row, number in zip(rows, sequences, strict=True):
        start = number * length
        assert row.tolist() == text[start : start + length].tolist()


def test_the_ends_of_subsets_make_no_sequence(tmp_path: Path) -> None:
    """The subsets have 20 and 28 targets: a sequence each, and 4 and 12 targets beyond it."""
    subsets = {"val/books": random_tokens(21, 1), "val/web": random_tokens(29, 2)}
    write_prepared(tmp_path, {"train": random_tokens(1000, 0), **subsets})

    (batch,) = complete_sequences(ready(str(tmp_path)), 16, 10**6)

    beginnings = [subset[:16].tolist() for subset in subsets.values()]
    assert batch.tokens.tolist() == beginnings
    assert batch.document_ids.shape == (2, 16)


def test_tokens_are_rounded_up_to_a_complete_sequence(run: Path) -> None:
    whole_split = measure(run, 16, tokens=10**9)
    two_sequences = measure(run, 16, tokens=17)

    assert whole_split["lengths"][16]["tokens"] == 64 * 16
    assert two_sequences["lengths"][16]["tokens"] == 2 * 16


@pytest.mark.parametrize(
    ("lengths", "remedy"),
    [("2000", "give shorter --lengths,"), ("16,64,2000,4000", "give --lengths 16,64,")],
)
def test_a_length_beyond_the_split_is_refused_before_any_is_measured(
    lengths: str, remedy: str, run: Path, tmp_path: Path, capsys
) -> None:
    command = ["diagnose", str(run), "--lengths", lengths, "--output", str(tmp_path / "out")]

    with pytest.raises(UserError, match=f"val has no 2,000 tokens in a row: {remedy}"):
        main(command)

    assert "attention at" not in capsys.readouterr().err


def test_masking_is_as_in_training_by_default(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "gpt", data, GPT, document_masking=False)

    by_default = measure(run, 16, 16)
    as_demanded = measure(run, 16, 16, masked=True)

    assert by_default["masking"] is False
    assert as_demanded["masking"] is True


class Output(NamedTuple):
    """What the command has written and printed."""

    folder: Path
    printed: str
    progress: str

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "diagnose.json").read_text())

    @property
    def report(self) -> str:
        return (self.folder / "report.md").read_text()


@pytest.fixture(scope="module")
def output(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Output:
    folder = tmp_path_factory.mktemp("output")
    options = ["--lengths=64,16", "--tokens=256", "--device=cpu", "--masking=off"]
    printed = io.StringIO()
    progress = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(progress):
        main(["diagnose", str(run), *options, f"--output={folder}"])
    return Output(folder, printed.getvalue(), progress.getvalue())


def test_the_command_writes_numbers(output: Output) -> None:
    record = output.record

    assert record["command"].startswith("anlit diagnose ")
    assert record["checkpoints"][0]["label"].startswith("anGPT, ")
    assert record["lengths"].keys() == {"16", "64"}
    statistics = record["lengths"]["64"]["statistics"]
    entropy = np.array(statistics["entropy"], dtype=float)
    n_layers = 2
    n_bins = 6
    assert entropy.shape == (n_layers, HEADS, n_bins)
    first_layer, _ = statistics["weight_1_to_10"]
    first_head, _ = first_layer
    assert first_head[0] is None, "the first token has nothing at these distances"


def test_the_report_has_a_section_for_each_length(output: Output) -> None:
    assert "## Sequences of 64 tokens" in output.report
    assert "## Sequences of 16 tokens" in output.report
    assert "masking off" in output.report
    assert "| 1 | " in output.report


@pytest.mark.parametrize("name", ["statistics", "ranges", "norms", "scores", "scores_untrained"])
def test_the_report_has_its_figures(output: Output, name: str) -> None:
    assert f"{name}.png" in output.report
    assert (output.folder / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("length", [16, 64])
def test_each_length_that_is_measured_is_printed(output: Output, length: int) -> None:
    """Long sequences take minutes."""
    assert f": attention at {length}\n" in output.progress


def test_the_command_prints_tables(output: Output) -> None:
    assert ": n = 32 to 64, means over heads" in output.printed
    assert "norms by layer, trained (untrained)" in output.printed
    assert "scores S = q·k/√D, trained" in output.printed


def test_the_cost_of_random_tokens_is_printed_and_reported(output: Output) -> None:
    loss = output.record["copying"]["first"]

    sentence = f"Random tokens cost {loss:.2f} nats each, the same once more"
    assert sentence in output.report
    assert sentence in output.printed


def in_third_bin(*values: float) -> list[list[list[float]]]:
    """A statistic of a layer: each head has its value in the third of four bins, else 9."""
    heads = [[9, 9, value, 9] for value in values]
    return [heads]


def test_the_table_has_the_longest_context_with_enough_queries() -> None:
    """The bin [8, 16) has 1 of 200 queries, too few. Sizes are roots of mean squares."""
    unknown = in_third_bin(math.nan, math.nan, math.nan)
    statistics: dict[str, Any] = {
        "entropy": unknown,
        "inverse_largest_weight": unknown,
        "weight_latest_100": unknown,
        "participation": unknown,
        "attention_sink": in_third_bin(0.25, 0.5, math.nan),
        "squared_average": in_third_bin(0.25, 0.25, 0.25),
    }
    result = {"length": 15, "edges": [1, 2, 4, 8], "statistics": statistics}
    few_long_contexts = result | {"queries": [19, 80, 100, 1]}
    only_long_contexts = result | {"queries": [0, 0, 0, 1]}

    assert last_bin(few_long_contexts) == (4, 7)
    assert last_bin(only_long_contexts) == (8, 15)
    table = statistics_table(few_long_contexts, "")
    assert table.rows == [["0", "–", "–", "0.375 [0.250, 0.500]", "–", "0.500", "–"]]

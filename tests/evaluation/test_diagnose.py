"""`anlit diagnose` on a tiny checkpoint: its numbers against attention computed pair by pair, and what it writes."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anlit import GPT, AnGPT, LogN, load_checkpoint
from anlit.commands.evaluations import main
from anlit.data.batch import document_ids
from anlit.errors import UserError
from anlit.evaluation.data import load_validation_data
from anlit.evaluation.diagnose import Diagnose, complete_sequences, table_rows
from anlit.evaluation.diagnose_figures import last_bin
from anlit.evaluation.settings import DiagnoseSettings
from tests.data.prepared import END, random_tokens
from tests.evaluation.saved import VAL_TOKENS, make_run

HEADS = 2
STRENGTH = 0.8
LOG_N = LogN(STRENGTH, learned="never")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    return make_run(
        tmp_path_factory.mktemp("runs") / "angpt", data, AnGPT, n_layers=2, attention=LOG_N
    )


def measured(
    run: Path, lengths: list[int], tokens: int, masked: bool | None = None
) -> dict[str, Any]:
    checkpoint = load_checkpoint(str(run), "cpu")
    diagnose = Diagnose(DiagnoseSettings(tuple(lengths), tokens=tokens, masking=masked))
    diagnose.plan([checkpoint], load_validation_data(checkpoint))
    return diagnose.measure(checkpoint, load_validation_data(checkpoint))


def spread_over(length: int, n_rows: int) -> list[int]:
    """The numbers of `n_rows` sequences from all over the validation split."""
    n_sequences = (VAL_TOKENS - 1) // length
    return [int((number + 0.5) * n_sequences / n_rows) for number in range(n_rows)]


def pair_by_pair(run: Path, length: int, n_rows: int, masked: bool) -> dict[str, Any]:
    """Entropy and squared size of the average of each query: [name][layer][head] → list of (n, value)."""
    model = load_checkpoint(str(run), "cpu").model
    text = random_tokens(VAL_TOKENS, 0).astype(np.int64)
    blocks = np.stack(
        [text[place * length : (place + 1) * length + 1] for place in spread_over(length, n_rows)]
    )
    tokens = blocks[:, :-1]
    ids = document_ids(blocks, END)[:, :-1] if masked else np.zeros_like(tokens)
    statistics: dict[str, Any] = {"entropy": {}, "squared_average": {}}

    def look(layer: int, q: Any, k: Any, v: Any) -> None:
        for b, h, i in np.ndindex(n_rows, HEADS, length):
            keys = [j for j in range(i + 1) if ids[b, j] == ids[b, i]]
            scale = STRENGTH * math.log(len(keys)) / math.sqrt(q.shape[-1])
            weights = (scale * (k[b, h, keys].double() @ q[b, h, i].double())).softmax(0)
            values = v[b, h, keys].double()
            size = (weights @ values).square().sum() / values.square().sum(-1).mean()
            for name, value in (
                ("entropy", -(weights * weights.log()).sum()),
                ("squared_average", size),
            ):
                statistics[name].setdefault((layer, h), []).append((len(keys), value.item()))

    for layer, block in enumerate(model.model.blocks):
        block.attention.register_forward_pre_hook(
            lambda _, arguments, layer=layer: look(layer, *arguments[:3])
        )
    with torch.no_grad():
        model(torch.from_numpy(tokens), torch.from_numpy(ids))
    return statistics


@pytest.mark.parametrize("masked", [True, False], ids=["documents", "one text"])
def test_statistics_are_those_of_attention_pair_by_pair(
    run: Path, masked: bool, monkeypatch
) -> None:
    """3 sequences of 40 tokens, longer than in training, from all over the split; by layer, head and bin of n."""
    monkeypatch.setattr("anlit.nn.attention.observe.QUERIES_PER_BLOCK", 7)
    result = measured(run, [40], 101, masked)
    own, expected = result["lengths"][40], pair_by_pair(run, 40, 3, masked)
    assert result["masking"] is masked
    assert (own["tokens"], own["edges"]) == (120, [1, 2, 4, 8, 16, 32])
    for name, layer, head in itertools.product(expected, range(2), range(HEADS)):
        queries = expected[name][layer, head]
        for place, edge in enumerate(own["edges"]):
            values = [value for n, value in queries if edge <= n < 2 * edge]
            assert len(values) == own["queries"][place]
            mean = sum(values) / len(values) if values else math.nan
            assert own["statistics"][name][layer][head][place] == pytest.approx(
                mean, rel=1e-4, nan_ok=True, abs=1e-6
            )
    assert own["queries"][-1] == 3 * 9 if not masked else own["queries"][0] > 3


def test_every_length_reads_whole_sequences_from_all_over_the_split(run: Path) -> None:
    """1,028 targets: at 1,000 one sequence; at 16 as many as asked for; the last 4 targets make none."""
    data = load_validation_data(load_checkpoint(str(run), "cpu"))
    text = random_tokens(VAL_TOKENS, 0)
    for length, asked, places in [
        (16, 10**6, range(64)),
        (16, 80, spread_over(16, 5)),
        (1000, 1, [0]),
    ]:
        tokens = torch.cat([batch.tokens for batch in complete_sequences(data, length, asked)])
        assert tokens.tolist() == [
            text[place * length : (place + 1) * length].tolist() for place in places
        ]
    assert measured(run, [16], 10**9)["lengths"][16]["tokens"] == 64 * 16
    assert measured(run, [16], 17)["lengths"][16]["tokens"] == 32
    with pytest.raises(
        UserError, match="val has no 2,000 tokens in a row: leave 2000 out of --lengths"
    ):
        measured(run, [2000], 1)


def test_masking_is_that_of_training_unless_told(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "gpt", data, GPT, document_masking=False)
    assert measured(run, [16], 16)["masking"] is False
    assert measured(run, [16], 16, True)["masking"] is True


def test_the_command_writes_numbers_report_and_figures(run: Path, tmp_path: Path, capsys) -> None:
    arguments = [
        "--lengths=64,16",
        "--tokens=256",
        "--device=cpu",
        "--masking=off",
        f"--output={tmp_path}",
    ]
    main(["diagnose", str(run), *arguments])
    record = json.loads((tmp_path / "diagnose.json").read_text())
    assert record["command"].startswith("anlit diagnose ")
    assert record["checkpoints"][0]["label"].startswith("anGPT, ")
    assert record["lengths"].keys() == {"16", "64"}
    statistics = record["lengths"]["64"]["statistics"]
    assert np.array(statistics["entropy"], dtype=float).shape == (2, HEADS, 6)
    assert statistics["weight_1_to_10"][0][0][0] is None, (
        "a first token has nothing at these distances"
    )
    report, printed = (tmp_path / "report.md").read_text(), capsys.readouterr().out
    for part in (
        "## Sequences of 64 tokens",
        "## Sequences of 16 tokens",
        "masking off",
        "| 1 | ",
        "heads.png",
    ):
        assert part in report
    assert all(
        (tmp_path / f"{name}.png").stat().st_size > 10_000
        for name in ("statistics", "ranges", "heads")
    )
    assert ": n = 32 to 64, means over heads" in printed
    for text in (report, printed):
        assert (
            f"Random tokens cost {record['copying']['first']:.2f} nats each, the same once more"
            in text
        )


def test_the_summary_is_of_the_longest_context_with_enough_queries() -> None:
    """The bin [8, 16) has 1 of 200 queries, too few; NaN is no head's value; sizes are roots of mean squares."""
    names = (
        "entropy",
        "inverse_largest_weight",
        "attention_sink",
        "weight_latest_100",
        "participation",
    )
    statistics = {name: [[[math.nan] * 4] * 3] for name in names} | {
        "attention_sink": [[[9, 9, 0.25, 9], [9, 9, 0.5, 9], [9, 9, math.nan, 9]]],
        "squared_average": [[[9, 9, 0.25, 9]] * 3],
    }
    own = {
        "length": 15,
        "edges": [1, 2, 4, 8],
        "queries": [19, 80, 100, 1],
        "statistics": statistics,
    }
    assert last_bin(own) == (4, 7)
    assert last_bin(own | {"queries": [0, 0, 0, 1]}) == (8, 15)
    assert table_rows(own) == [["0", "–", "–", "–", "0.375 [0.250, 0.500]", "–", "0.500", "–"]]

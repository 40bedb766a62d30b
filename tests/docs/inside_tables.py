"""Tables and sentences of inside.md, computed from the records."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from anlit.evaluation.hidden_norms import norms_table
from tests.docs.page_tables import INSIDE, Rows, table
from tests.docs.records import column, read_record
from tests.docs.section_claims import section

RUNS = {
    "anGPT": "angpt",
    "anGPT, scale-invariant": "angpt-scale-invariant",
    "nGPT": "ngpt",
    "GPT+": "gpt",
}
"""Label on the page → name of the record."""


def inside(name: str, state: str = "trained") -> Any:
    return read_record(f"inside/{name}.json")["inside"][state]


def norm(name: str, vector: str, layer: int, state: str = "trained") -> float:
    """Return the mean norm of a vector in a layer."""
    mean: float = inside(name, state)["norms"][vector]["mean"][layer]
    return mean


def score_moments(name: str, moment: str, state: str = "trained") -> list[float]:
    """Return a moment of the scores by layer, as the mean over heads."""
    layers = column(inside(name, state)["scores"], moment)
    return [float(np.mean(heads)) for heads in layers]


@table(INSIDE, "Norms")
def norms_of_angpt() -> Rows:
    norms = inside("angpt")["norms"]
    untrained = inside("angpt", "untrained")["norms"]
    return list(map(list, norms_table(norms, untrained, "").rows))


@table(INSIDE, "Scores")
def moments_of_scores() -> Rows:
    rows = []
    for label, name in RUNS.items():
        means = _listed(score_moments(name, "mean"))
        deviations = _listed(score_moments(name, "standard_deviation"))
        rows.append([label, means, deviations])
    return rows


def _listed(values: list[float]) -> str:
    return ", ".join(map("{:.2f}".format, values)).replace("-", "−")


@section(INSIDE, "Norms")
def norms() -> Iterator[str]:
    h_A = norm("angpt", "h_A", -1)
    h_M = norm("angpt", "h_M", -1)
    h = norm("angpt", "h", -1)
    yield f"the last layer's ‖h_A‖ is {h_A:.2f} and its ‖h_M‖ {h_M:.2f}, and ‖h‖ ends at {h:.2f}"
    yield f"‖h‖ falls to {norm('angpt', 'h', -1, 'untrained'):.2f}"
    of_ngpt = inside("ngpt")["norms"]["h_M"]["mean"]
    yield f"the trained ‖h_M‖ is {min(of_ngpt):.2f} to {max(of_ngpt):.2f}"


@section(INSIDE, "Scores")
def scores() -> Iterator[str]:
    kurtosis = np.mean(score_moments("angpt", "excess_kurtosis", "untrained"))
    yield f"the excess kurtosis of {kurtosis:.2f} is".replace("-", "−")
    for name in RUNS.values():
        assert np.allclose(score_moments(name, "mean", "untrained"), 0, atol=0.05)
        deviations = score_moments(name, "standard_deviation", "untrained")
        assert np.allclose(deviations, 1, atol=0.05)


@section("README.md", "Results")
def in_one_sentence() -> Iterator[str]:
    yield f"the last layer's ‖h_M‖ is {norm('angpt', 'h_M', -1):.2f} in the demo's model"

"""Tables of ln P = ln E Σ w² over the number of keys n and over a gain g, and how they are read.

Computed at few n and g, refined by splines, read linearly: two roundings of a smooth function, together below
1 part in 10³ of P.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from anlit.attention.gaussian_quadrature import KeyTerms, Pieces, grid

Values = tuple[tuple[float, ...], ...] | None
"""Rows of a(t), m(t) or g(n) as numbers, by which layers of equal settings share a table; None where trivial."""

DENSE = 16  # up to this count a table has every n, and from there on as many entries per octave
HALFWAY = 3.0  # tables over g have equal steps in g/(g + HALFWAY), from 0 to 1
COARSE, FINE = 48, 512  # steps in g computed, and kept


def expected_squares(a: Tensor | None, m: Tensor | None, g: Tensor | None, pieces: Pieces, at: list[int]) -> Tensor:
    """E Σ w² for the counts pieces.counts[at]: (H or 1, N) float64.

    Args:
        a, m: (H or 1, K) float64 at the distances of `pieces`, or None.
        g: (H or 1, N) at those counts, or None.
        pieces: The sums over the keys.
        at: N indices.
    """
    a = pieces.t.new_ones(1, 1) if a is None else a
    if g is None:
        terms = KeyTerms.of(a, int(pieces.counts[-1]))
        return terms.integral(m, pieces, terms.points(m))[:, at]
    columns = []
    for column, index in zip(g.T, at, strict=True):
        some = pieces.only(index)
        b, bias = column[:, None] * a[:, : len(some.t)], None if m is None else m[:, : len(some.t)]
        terms = KeyTerms.of(b, int(some.counts))
        columns.append(terms.integral(bias, some, terms.points(bias)))
    return torch.cat(columns, -1)


@lru_cache(maxsize=64)
def over_n(a: Values, m: Values, g: Values, largest: int) -> Tensor:
    """(H or 1, L) float64, on the host: ln P for a and m at the pieces of `grid(largest)`, g at its counts."""
    pieces = Pieces.up_to(grid(largest))
    P = expected_squares(_rows(a), _rows(m), _rows(g), pieces, list(range(len(pieces.counts))))
    return P.log() @ refinement(largest).T


@lru_cache(maxsize=16)
def over_n_and_g(a: Values, m: Values, largest: int) -> Tensor:
    """(H or 1, L, FINE + 1) float64, on the host: as `over_n`, for every gain from 0 to infinity."""
    pieces = Pieces.up_to(grid(largest))
    share = np.linspace(0, 1, COARSE + 1)
    every = list(range(len(pieces.counts)))
    scale = torch.ones(1, 1, dtype=torch.float64) if (rows := _rows(a)) is None else rows
    gains = HALFWAY * share[:-1] / (1 - share[:-1])
    finite = [expected_squares(gain * scale, _rows(m), None, pieces, every).log() for gain in gains.tolist()]
    log_P = torch.stack([*finite, torch.zeros_like(finite[0])], -1)  # an infinite gain: the largest has all weight
    return refinement(largest) @ log_P @ _spline(share, np.linspace(0, 1, FINE + 1)).T


@lru_cache(maxsize=16)
def refinement(largest: int) -> Tensor:
    """(L, N) float64: from values at the counts of `grid(largest)` to the entries of a table, by a cubic spline."""
    octaves = math.ceil(DENSE * math.log2(largest / DENSE))
    fine = np.concatenate((np.arange(1, DENSE), DENSE * 2 ** (np.arange(octaves + 1) / DENSE)))
    return _spline(np.log(grid(largest)), np.log(fine))


def read(table: Tensor, n: Tensor) -> Tensor:
    """Linear in ln n: table (H', L), n (…, 1, T) → (…, H', T)."""
    i, z = _cell(_row(n), table.shape[1])
    heads = torch.arange(table.shape[0], device=table.device)[:, None]
    return torch.lerp(table[heads, i], table[heads, i + 1], z)


def read_plane(table: Tensor, n: Tensor, g: Tensor) -> Tensor:
    """Linear in ln n and in g/(g + 3), g of either sign: table (H', L, G), n (…, 1, T), g (…, H, T) → (…, H, T)."""
    g = g.abs()
    i, z = _cell(_row(n), table.shape[1])
    j, x = _cell((table.shape[2] - 1) * (1 - HALFWAY / (g + HALFWAY)), table.shape[2])
    heads = torch.arange(table.shape[0], device=table.device)[:, None]
    near = torch.lerp(table[heads, i, j], table[heads, i, j + 1], x)
    far = torch.lerp(table[heads, i + 1, j], table[heads, i + 1, j + 1], x)
    return torch.lerp(near, far, z)


def _row(n: Tensor) -> Tensor:
    """Where in a table a count is, a fraction."""
    return torch.where(n <= DENSE, n - 1, DENSE - 1 + DENSE * torch.log2(n / DENSE))


def _cell(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The entry before, and how far beyond it: more than 1 behind the last, where the line is continued."""
    before = place.floor().clamp(0, size - 2)
    return before.long(), place - before


def _rows(values: Values) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _spline(knots: np.ndarray, points: np.ndarray) -> Tensor:
    """(points, knots) float64: the cubic spline through values at the knots, evaluated, as a matrix."""
    from scipy.interpolate import CubicSpline  # here, for it takes a second that models without ν_att need not wait

    return torch.from_numpy(CubicSpline(knots, np.eye(len(knots)))(points))

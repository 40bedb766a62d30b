"""E Σ w², for softmax weights w of n keys with independent normal logits, by quadrature.

A query's logits are L_t = b_t·x_t + m_t, t = 0 … n−1, with x_t independent standard normal; w = softmax(L). With
Z = Σ e^{L_t} and 1/Z² = ∫ s e^{−sZ} ds over s > 0, the expectation is that of independent factors; with s = e^y

    E Σ w² = ∫ Σ_t R_t(y + m_t) · exp(−Σ_k H_k(y + m_k)) dy,
    H_t(u) = −ln E exp(−e^{u + b_t x}),      R_t(u) = E[e^{2(u + b_t x)} exp(−e^{u + b_t x})] · e^{H_t(u)}.

Both integrals, over x and over y, are of functions that are analytic in a strip of width π around the real axis
and fall off at both ends, so the trapezoid rule converges exponentially. The sums over t are taken piece by piece:
c neighbouring keys are as two, each c/2 times, at their mean distance ± √((c²−1)/12), which is exact where a term
is cubic in t, and for c ≤ 2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

REACH = 8.0  # standard deviations of x that are taken into account: with 7, 1 part in 10⁴ is missed at n = 2²⁰
LARGEST_B = 32.0  # beyond it 1 − E Σ w² is inversely proportional to b
X_STEP = 0.75  # of b·x
U_STEP = 0.25
Y_STEP = 0.4
MOST_AT_ONCE = 2**20  # elements


@dataclass(frozen=True)
class Pieces:
    """How the keys of several queries are summed.

    Args:
        counts: (N,) float64, increasing numbers of keys n.
        t: (K,) float64 distances at which terms are evaluated.
        sums: (N, K) float64: sums @ terms is the sum of the terms over the nearest n keys, for every n of `counts`.
    """

    counts: Tensor
    t: Tensor
    sums: Tensor

    @staticmethod
    def up_to(counts: list[int]) -> "Pieces":
        """One piece between each count and the next; the first count is 1."""
        ends = torch.tensor(counts, dtype=torch.float64)
        size = ends.diff(prepend=ends.new_zeros(1))
        mean, spread = ends - (size + 1) / 2, ((size**2 - 1) / 12).sqrt()
        t = torch.stack((mean - spread, mean + spread), -1).flatten()
        below = torch.ones(len(counts), len(counts), dtype=torch.float64).tril()
        return Pieces(ends, t, (below * size / 2).repeat_interleave(2, -1))

    def to(self, device: torch.device) -> "Pieces":
        return Pieces(self.counts.to(device), self.t.to(device), self.sums.to(device))

    def only(self, index: int) -> "Pieces":
        """Those of one count, the nearest keys first as before."""
        end = 2 * index + 2
        return Pieces(self.counts[index : index + 1], self.t[:end], self.sums[index : index + 1, :end])


def grid(largest: int) -> list[int]:
    """Counts 1 … 8, then four per octave, up to `largest`, itself included: what is smooth in ln n needs no more."""
    octaves = math.log2(max(largest, 8) / 8)
    spaced = {round(8 * 2 ** (k / 4)) for k in range(math.ceil(4 * octaves))}
    return sorted(n for n in {*range(1, 9), *spaced, largest} if n <= largest)


@dataclass(frozen=True)
class KeyTerms:
    """ln H and ln R of keys over u, for up to n of them.

    Args:
        log_h, log_r: (H, K, U) float64; H is 1 if all heads are alike, K if all keys are.
        low: The first u; the step is `U_STEP`.
        shrink: (H, 1), the factor by which b was reduced to at most `LARGEST_B`.
        reach: (highest u at which the nearest key counts, lowest at which any does), where m is 0.
    """

    log_h: Tensor
    log_r: Tensor
    low: float
    shrink: Tensor
    reach: tuple[float, float]

    @staticmethod
    def of(b: Tensor, n: int) -> "KeyTerms":
        """From b of shape (H, K), float64, which is waited for if it is on a device."""
        b = b.abs()
        shrink = (LARGEST_B / b.amax(-1, keepdim=True)).clamp_max(1)
        b = b * shrink
        nearest, top = b[:, 0].max().item(), b.max().item()
        lowest, highest = -(REACH * top + math.log(n) + 7), REACH * nearest + 4
        low = lowest - 7
        u = low + U_STEP * torch.arange(math.ceil((REACH * top + 6 - low) / U_STEP), device=b.device, dtype=b.dtype)
        step = X_STEP / max(top, X_STEP)
        x = step * torch.arange(-math.ceil(REACH / step), math.ceil(REACH / step) + 1, device=b.device, dtype=b.dtype)
        density = (-(x**2) / 2).softmax(0)
        rows = max(1, MOST_AT_ONCE // (u.numel() * x.numel()))
        parts = [_log_terms(some, u, x, density) for some in b.flatten().split(rows)]
        log_h, log_r = (torch.cat(part).unflatten(0, b.shape) for part in zip(*parts, strict=True))
        return KeyTerms(log_h, log_r, low, shrink, (highest, lowest))

    def points(self, m: Tensor | None) -> int:
        """How many y the integral is to be evaluated at, for biases like m; waits for m."""
        spread = 0.0 if m is None else (m.amax(-1) - m[..., 0]).max().item()
        return math.ceil((self.reach[0] - self.reach[1] + spread) / Y_STEP)

    def integral(self, m: Tensor | None, pieces: Pieces, points: int) -> Tensor:
        """E Σ w² for every count of the pieces: (H, N). m: (H or 1, K) biases; nothing waits for its values."""
        if m is None:
            step = torch.full_like(self.shrink, U_STEP)
            h, r = self.log_h.exp(), self.log_r.exp()
        else:
            first = self.reach[1] - m.amax(-1, keepdim=True)
            step = (self.reach[0] - m[:, :1] - first) / points
            y = first + step * torch.arange(points + 1, device=m.device)
            place = (y[:, None] + m[..., None] - self.low) / U_STEP
            h, r = _cubic(self.log_h, place).exp(), _cubic(self.log_r, place).exp()
        sums = pieces.sums if h.shape[-2] > 1 else pieces.sums.sum(-1, keepdim=True)
        P = (sums @ r * torch.exp(-(sums @ h))).sum(-1) * step
        P = 1 - (1 - P) * self.shrink
        return torch.where(pieces.counts == 1, 1.0, P)


def _log_terms(b: Tensor, u: Tensor, x: Tensor, density: Tensor) -> tuple[Tensor, Tensor]:
    """ln H and ln R, (K, U), for b of shape (K,)."""
    v = (u[:, None] + b[:, None, None] * x).clamp_max(6.5).exp()  # exp(−e^{6.5}) is still above 0
    survives = torch.exp(-v)
    h = -(survives @ density).log()
    r = (v.square() * survives) @ density
    floor = torch.finfo(b.dtype).eps / 100  # of what is 0 up to rounding: an outlier would swing the interpolation
    return h.clamp_min(floor).log(), r.clamp_min(torch.finfo(b.dtype).tiny).log() + h


def _cubic(table: Tensor, place: Tensor) -> Tensor:
    """Rows of `table` (H, K, U) between the entries: Lagrange's cubic at `place` (H', K', Y), constant beyond them."""
    heads = torch.arange(table.shape[0], device=table.device)[:, None, None]
    keys = torch.arange(table.shape[1], device=table.device)[:, None]
    place = place.clamp(1, table.shape[2] - 3)
    left = place.floor().clamp_max(table.shape[2] - 4)
    z, i = place - left, left.long()
    at = [table[heads, keys, i + k] for k in (-1, 0, 1, 2)]
    inner = (at[1] * (1 - z) + at[2] * z) * (1 + z) * (2 - z) / 2
    outer = (at[0] * (2 - z) + at[3] * (1 + z)) * z * (1 - z) / 6
    return inner - outer

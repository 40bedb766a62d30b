"""How much softmax attention shortens an average of values, if the scores S are independent and standard normal.

The weights of a query with n visible keys have the participation P(n) = E Σ w², so a weighted mean of orthogonal unit
vectors has root mean square norm √P(n), and ν_att(n) = 1/√P(n) brings it back to 1, as the other ν of anGPT do for
its maps. P falls from 1 at n = 1 to 1/n where all keys are alike (g = 0), and goes to 1 for g → ∞.

`participation` is right to 1 part in 10⁵ up to n = 2²⁰, from b = a·g = 32 on to 1 in 10⁴; `nu_att` interpolates it to
1 part in 10³. They evaluate a and m between integers too and sum over pieces that grow with distance, so where the
weight lies a and m must be smooth in ln(1 + t): a steep bias towards the farthest keys is not. Both are constants of
the model: no gradient flows through them, to learned coefficients either. The derivation is in
`anlit.attention.gaussian_quadrature`.

What `nu_att` costs depends on which of a, g, m read parameters:
    none, or g alone    a table over n, or over n and g, once for all layers of equal settings; calls look up
    m alone, no g       each call integrates anew, per head some 15 thousand terms at n up to 4096
    any other           each call is one of `participation` at about 50 counts up to 4096: right, but slow
"""

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from anlit.attention import gaussian_tables as tables
from anlit.attention.gaussian_quadrature import KeyTerms, Pieces, grid
from anlit.attention.mechanism import Mechanism

LogP = Callable[[Mechanism, Tensor], Tensor]
"""(mechanism, n) → ln P: n of shape (…, 1, T) → broadcastable to (…, H, T)."""

SHORTEST_TABLE = 64


@torch.no_grad()
def participation(mechanism: Mechanism, n: Tensor) -> Tensor:
    """P(n) = E Σ w² over n independent standard normal scores; waits for the device.

    Args:
        mechanism: One that `for_layer` made, on the device of n.
        n: Whole numbers ≥ 1 of any shape and dtype. Each distinct one costs an integral if there is a g(n).

    Returns:
        (H, *n.shape) float64, or (1, *n.shape) where all heads are alike; float32 on a device without float64.
    """
    wanted, place = torch.unique(n.long(), return_inverse=True)
    counts = sorted({*grid(int(wanted[-1])), *wanted.tolist()})
    pieces = Pieces.up_to(counts).to(_home(n.device))
    a, m = _distance_functions(mechanism, pieces, n.device)
    g = _gain(mechanism, wanted)
    P = tables.expected_squares(a, m, g, pieces, [counts.index(count) for count in wanted.tolist()])
    return P.to(n.device, _widest(n.device))[:, place]


def nu_att(mechanism: Mechanism, n: Tensor, longest: int | None = None) -> Tensor:
    """ν_att(n) = 1/√P(n), interpolated; the first call makes a table and waits for the device, later ones do not.

    Args:
        mechanism: One that `for_layer` made. Its functions may change with its parameters only.
        n: (B, 1, T) or (1, T) counts ≥ 1, of any dtype.
        longest: The largest n that occurs, if it may exceed T.

    Returns:
        Broadcastable to (B, H, T), in n's dtype but float32 at least.
    """
    if torch.compiler.is_compiling():  # a graph ends here; disabled only now, for that imports the compiler
        return torch.compiler.disable(_nu_att)(mechanism, n, longest)
    return _nu_att(mechanism, n, longest)


@torch.no_grad()
def _nu_att(mechanism: Mechanism, n: Tensor, longest: int | None) -> Tensor:
    wide = n.to(torch.promote_types(n.dtype, torch.float32))
    size = 2 ** math.ceil(math.log2(max(longest or n.shape[-1], SHORTEST_TABLE)))
    key = size, n.device, wide.dtype
    with torch.autocast(n.device.type, enabled=False):
        plans = _PLANS.setdefault(mechanism, {})
        if key not in plans:
            plans[key] = _plan(mechanism, *key)
        return torch.exp(-0.5 * plans[key](mechanism, wide))


_PLANS: WeakKeyDictionary[Mechanism, dict[tuple[int, torch.device, torch.dtype], LogP]] = WeakKeyDictionary()


def _plan(mechanism: Mechanism, size: int, device: torch.device, dtype: torch.dtype) -> LogP:
    """The cheapest way to ln P that follows the parameters which `mechanism` reads."""
    one = torch.ones(1, 1, 1, device=device)
    g_is_learned = _reads_parameters(mechanism.gain, one)
    a_is_learned = _reads_parameters(mechanism.distance_gain, one[0, 0])
    m_is_learned = _reads_parameters(mechanism.distance_bias, one[0, 0])
    if a_is_learned or (m_is_learned and mechanism.gain(one) is not None):
        return _anew(size, device)
    if m_is_learned:
        return _anew_in_m(mechanism, size, device)
    pieces = Pieces.up_to(grid(size))
    a, m = (_values(part) for part in _distance_functions(mechanism, pieces, device))
    if g_is_learned:
        plane = tables.over_n_and_g(a, m, size).to(device, dtype)
        return lambda mechanism, n: tables.read_plane(plane, n, _must(mechanism.gain(n)))
    g = _values(_gain(mechanism, pieces.counts.to(device, _widest(device))))
    table = tables.over_n(a, m, g, size).to(device, dtype)
    return lambda mechanism, n: tables.read(table, n)


def _anew(size: int, device: torch.device) -> LogP:
    """Whatever is learned: by `participation`."""
    counts = torch.tensor(grid(size), device=device)
    refine = tables.refinement(size).to(device, _widest(device))
    return lambda mechanism, n: tables.read((participation(mechanism, counts).log() @ refine.T).to(n.dtype), n)


def _anew_in_m(mechanism: Mechanism, size: int, device: torch.device) -> LogP:
    """m alone is learned: what each key adds is tabulated, and every call adds it up for the biases of now."""
    home = _home(device)
    pieces, refine = Pieces.up_to(grid(size)).to(home), tables.refinement(size).to(home)
    a, m = _distance_functions(mechanism, pieces, device)
    terms = KeyTerms.of(pieces.t.new_ones(1, 1) if a is None else a, size)
    points = terms.points(m)

    def integrated(mechanism: Mechanism, n: Tensor) -> Tensor:
        P = terms.integral(_distance_functions(mechanism, pieces, n.device)[1], pieces, points)
        return tables.read((P.log() @ refine.T).to(n.device, n.dtype), n)

    return integrated


class _Reads(TorchFunctionMode):
    """Notices whether a parameter takes part in a computation, whether it now requires a gradient or not."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.seen |= any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        return func(*args, **(kwargs or {}))


def _reads_parameters(function: Callable[[Tensor], Tensor | None], argument: Tensor) -> bool:
    with _Reads() as reads:
        result = function(argument)
    return reads.seen or isinstance(result, nn.Parameter)


def _distance_functions(
    mechanism: Mechanism, pieces: Pieces, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """a and m at the distances of `pieces`: each (H or 1, K) float64 where `pieces` is, or None."""
    t = pieces.t.to(device, _widest(device))
    a, m = (_rows(part, len(t), pieces.t.device) for part in (mechanism.distance_gain(t), mechanism.distance_bias(t)))
    return a, m


def _gain(mechanism: Mechanism, n: Tensor) -> Tensor | None:
    """g at the counts n, (N,): (H or 1, N) float64 at n's home, or None."""
    return _rows(mechanism.gain(n.to(_widest(n.device))[None, None]), len(n), _home(n.device))


def _rows(part: Tensor | None, width: int, home: torch.device) -> Tensor | None:
    if part is None:
        return None
    whole = part.expand(torch.broadcast_shapes(part.shape, (1, width)))
    return whole.to(home, torch.float64).reshape(-1, width)


def _must(gain: Tensor | None) -> Tensor:
    assert gain is not None, "a gain that reads parameters is not trivial"
    return gain


def _values(rows: Tensor | None) -> tables.Values:
    return None if rows is None else tuple(tuple(row) for row in rows.tolist())


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _home(device: torch.device) -> torch.device:
    """Where float64 is computed for a device: there, if it can."""
    return torch.device("cpu") if device.type == "mps" else device

"""The three architectures written out from their formulas: the oracle of the parity tests.

Slow on purpose. Everything is a loop over sequences, positions, heads, queries and keys on single vectors, the
constants are worked out here a second time, and nothing is imported from anlit. Parameters come as a dict from the
model's names to float64 tensors, so that gradients can be compared name by name.

Letters: d width, D head width, H heads, f width of the MLP, L layers; W of shape (out, in).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Vectors = list[Tensor]
"""One vector per position."""
Heads = list[Vectors]
"""Per position, one vector per head."""
Logit = Callable[[Tensor, int, int, int, "Block"], Tensor]
"""(score S_ij, distance i − j, number of keys that the query may see, head, parameters of the block) → L_ij."""
Layer = tuple[Logit, Sequence[float], int | None]
"""Of one layer: its logits, the radians per token of each rotated pair of dimensions, and how many keys it sees."""


@dataclass(frozen=True)
class Settings:
    """What a model is besides its parameters."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_ff: int
    layers: Sequence[Layer]
    qk_norm: bool
    norm_eps: float
    alpha: tuple[float, float]  # initial value and scale of the residual step sizes
    s_z: tuple[float, float]  # and of the logits' scaling vector
    qk_norm_gain: bool | None = None
    qk_norm_eps: float | None = None
    v_norm: bool = False
    attention_norm: bool = False
    gated: bool = False
    post_norm: bool = False
    s_qk: bool = False
    silu_std: float | None = None
    residual_factor: bool = True
    error: float = 0.0  # of all constant factors of anGPT


class Block:
    """The parameters of one block under their short names."""

    def __init__(self, parameters: dict[str, Tensor], layer: int) -> None:
        self.parameters, self.prefix = parameters, f"blocks.{layer}."

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[self.prefix + name]

    def learned(self, name: str, head: int) -> Tensor:
        """A mechanism's coefficient for this head: learned per head, or one for the layer."""
        path = f"attention.mechanism.{name}.value"
        if self.prefix + path not in self.parameters:  # inside a sliding window
            path = f"attention.mechanism.mechanism.{name}.value"
        value = self[path]
        return value[head] if len(value) > 1 else value[0]

    def learned_globally(self) -> Tensor:
        """The only coefficient that all layers share."""
        return self.parameters["shared_coefficients.0.value"][0]


# Positions: of the rotated dimensions, i turns with i + half.


def rope(d_head: int, fraction: float, base: float = 10_000.0) -> list[float]:
    width = int(d_head * fraction)
    return [1 / base ** (2 * i / width) for i in range(width // 2)]


def dynamic_ntk(
    d_head: int, fraction: float, stretch: float, base: float = 10_000.0
) -> list[float]:
    """RoPE whose base grew by stretch^(r/(r−2)): pair i is slowed down by stretch^(2i/(r−2))."""
    width = int(d_head * fraction)
    return [
        f / stretch ** (2 * i / (width - 2)) for i, f in enumerate(rope(d_head, fraction, base))
    ]


def p_rope(d_head: int, base: float = 1024.0) -> list[float]:
    quarter = d_head // 4
    return [1 / base ** (i / (quarter - 1)) for i in range(quarter)] + [0.0] * quarter


def place(position: int, ids: Sequence[int] | None) -> int:
    """A token's position in its own document: where documents are masked, positions restart with each."""
    return position if ids is None else sum(ids[j] == ids[position] for j in range(position))


def rotate(x: Tensor, position: int, frequencies: Sequence[float]) -> Tensor:
    turned, half = list(x), len(frequencies)
    for i, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        turned[i] = cos * x[i] - sin * x[i + half]
        turned[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(turned)


# Parts.


def unit(x: Tensor) -> Tensor:
    return x / (x @ x) ** 0.5


def rms(x: Tensor, eps: float) -> Tensor:
    return x / ((x @ x) / len(x) + eps) ** 0.5


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def heads(weight: Tensor, x: Tensor, n_heads: int) -> Vectors:
    """W x, cut into one vector per head: head h owns rows h·D … (h+1)·D of W."""
    d_head = weight.shape[0] // n_heads
    return [weight[h * d_head : (h + 1) * d_head] @ x for h in range(n_heads)]


def shared(vectors: Vectors, head: int, s: Settings) -> Tensor:
    """The key or value that a query head uses: n_heads/n_kv_heads query heads in a row have the same."""
    return vectors[head // (s.n_heads // len(vectors))]


def project(
    xs: Vectors, ids: Sequence[int] | None, block: Block, s: Settings, turn: Callable[[Tensor, str, int], Tensor],
    s_qk: Sequence[Tensor] | None = None,
) -> tuple[Heads, Heads, Heads]:  # fmt: skip
    """Queries, keys and values of each position and head.

    `turn` is called with W x of a head, q or k, and the token's place. `s_qk` has a vector for each head of queries,
    which multiplies the keys that they share, too.
    """
    q: Heads = []
    k: Heads = []
    for position, x in enumerate(xs):
        for name, into, n in (("q", q, s.n_heads), ("k", k, s.n_kv_heads)):
            vectors = [
                turn(y, name, place(position, ids)) for y in heads(block[f"W_{name}.weight"], x, n)
            ]
            if s_qk is not None:
                vectors = [shared(vectors, head, s) * s_qk[head] for head in range(s.n_heads)]
            into.append(vectors)
    return q, k, [heads(block["W_v.weight"], x, s.n_kv_heads) for x in xs]


def attend(
    q: Heads, k: Heads, v: Heads, x: Vectors, ids: Sequence[int] | None, block: Block, layer: Layer, s: Settings,
    norm: Callable[[Tensor, str], Tensor],
) -> Vectors:  # fmt: skip
    """Per position, the heads' averages of v side by side, as they go into W_o.

    `x` is what the gates read; `norm` is the architecture's norm, called with a vector and the name of its gain.
    """
    logit, _, window = layer
    output = []
    for i in range(len(q)):
        keys = [
            j
            for j in range(i + 1)
            if (ids is None or ids[j] == ids[i]) and (window is None or i - j < window)
        ]
        averages = []
        for h in range(len(q[i])):
            average, total = torch.zeros_like(v[0][0]), 0.0
            for j in keys:
                score = (q[i][h] * shared(k[j], h, s)).sum() * len(q[i][h]) ** -0.5
                weight, value = (
                    torch.exp(logit(score, i - j, len(keys), h, block)),
                    shared(v[j], h, s),
                )
                average = average + weight * (norm(value, "norm_v") if s.v_norm else value)
                total = total + weight
            averages.append(
                norm(average / total, "output.norm") if s.attention_norm else average / total
            )
        side_by_side = torch.cat(averages)
        if s.gated:
            gate = 2 / (1 + torch.exp(-block["output.W_g.weight"] @ x[i]))
            side_by_side = side_by_side * gate.repeat_interleave(len(side_by_side) // len(gate))
        output.append(side_by_side)
    return output


def nu_acf(sigma: float) -> float:
    """1/√E[SiLU(σx)²] for x ~ N(0, 1), by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    values = sigma * nodes
    mean_square = (weights * (values / (1 + np.exp(-values))) ** 2).sum() / math.sqrt(2 * math.pi)
    return float(1 / np.sqrt(mean_square))


# Architectures: h of one sequence → logits of that sequence.


def gpt(
    parameters: dict[str, Tensor], h: Vectors, ids: Sequence[int] | None, s: Settings
) -> Tensor:
    qk_eps = s.norm_eps if s.qk_norm_eps is None else s.qk_norm_eps
    for number, layer in enumerate(s.layers):
        block = Block(parameters, number)

        def norm(x: Tensor, name: str, block: Block = block) -> Tensor:
            return rms(x, s.norm_eps) * block[f"{name}.gain"]

        def turn(
            x: Tensor, name: str, place: int, block: Block = block, layer: Layer = layer
        ) -> Tensor:
            if s.qk_norm:
                x = rms(x, qk_eps) * (1 if s.qk_norm_gain is False else block[f"norm_{name}.gain"])
            return rotate(x, place, layer[1])

        xs = [norm(h_i, "norm_1") for h_i in h]
        attended = attend(*project(xs, ids, block, s, turn), xs, ids, block, layer, s, norm)
        after = []
        for h_i, a in zip(h, attended, strict=True):
            update = block["W_o.weight"] @ a
            h_i = h_i + (norm(update, "post_norm_A") if s.post_norm else update)
            x = norm(h_i, "norm_2")
            update = block["W_d.weight"] @ (
                (block["W_u.weight"] @ x) * silu(block["W_z.weight"] @ x)
            )
            after.append(h_i + (norm(update, "post_norm_M") if s.post_norm else update))
        h = after
    return torch.stack(
        [
            parameters["head.weight"] @ (rms(h_i, s.norm_eps) * parameters["norm_f.gain"])
            for h_i in h
        ]
    )


def ngpt(
    parameters: dict[str, Tensor], h: Vectors, ids: Sequence[int] | None, s: Settings
) -> Tensor:
    root_d = math.sqrt(s.d_model)
    for number, layer in enumerate(s.layers):
        block = Block(parameters, number)
        alpha_a, alpha_m = (
            (block[f"alpha_{part}.stored"] * (s.alpha[0] / s.alpha[1])).abs() for part in "AM"
        )

        def turn(x: Tensor, name: str, place: int, layer: Layer = layer) -> Tensor:
            # Softmax scale √D on unit vectors, over the 1/√D in `attend`: √D on q and on k.
            # Without QK-norm √d on both, which a finite ε is relative to (the package's choices).
            x = rotate(x, place, layer[1])
            if not s.qk_norm:
                return x * root_d
            return (
                rms(x * root_d, s.qk_norm_eps) if s.qk_norm_eps else unit(x) * math.sqrt(s.d_head)
            )

        has_s_qk = s.qk_norm_gain is not False
        s_qk = (
            (block["s_qk.stored"] * root_d).split(s.d_head) if has_s_qk else None
        )  # init 1, scale 1/√d
        q, k, v = project(h, ids, block, s, turn, s_qk)
        attended = attend(
            q, k, v, [root_d * x for x in h], ids, block, layer, s, lambda x, name: unit(x)
        )
        after = []
        for h_i, a in zip(h, attended, strict=True):
            h_a = unit(block["W_o.weight"] @ a)
            h_i = unit(h_i + alpha_a * (h_a - h_i))
            u = block["s_u.stored"] * (block["W_u.weight"] @ h_i)
            z = root_d * block["s_v.stored"] * (block["W_z.weight"] @ h_i)
            h_m = unit(block["W_d.weight"] @ (u * silu(z)))
            after.append(unit(h_i + alpha_m * (h_m - h_i)))
        h = after
    s_z = parameters["s_z.stored"] * (s.s_z[0] / s.s_z[1])
    return torch.stack([s_z * (parameters["head.weight"] @ h_i) for h_i in h])


def angpt(
    parameters: dict[str, Tensor], h: Vectors, ids: Sequence[int] | None, s: Settings
) -> Tensor:
    d, root_d, f, off = s.d_model, math.sqrt(s.d_model), s.d_ff, 1 + s.error
    nu_qkv, nu_p, nu_uz, nu_d = (
        off * math.sqrt(x) for x in (d / s.d_head, s.d_head / d, d / f, f / d)
    )
    sigma = math.sqrt(d / f) if s.silu_std is None else s.silu_std

    def step(h: Tensor, to: Tensor, alpha: Tensor) -> Tensor:
        nu = (alpha**2 + (1 - alpha) ** 2) ** -0.5 if s.residual_factor else 1.0
        return nu * (h + alpha * ((unit(to) if s.post_norm else to) - h))

    for number, layer in enumerate(s.layers):
        block = Block(parameters, number)
        alpha_a, alpha_m = (
            block[f"alpha_{part}.stored"] * (s.alpha[0] / s.alpha[1]) for part in "AM"
        )

        def turn(
            x: Tensor, name: str, place: int, block: Block = block, layer: Layer = layer
        ) -> Tensor:
            # q and k get root mean square 1 by √D (the package's choice): without QK-norm, and where a finite ε is
            # added to the mean square. A gain comes before the rotation.
            x = nu_qkv * x * (1 if s.qk_norm and s.qk_norm_eps is None else math.sqrt(s.d_head))
            if s.qk_norm:
                x = rms(x, s.norm_eps if s.qk_norm_eps is None else s.qk_norm_eps)
            return rotate(
                x * block[f"norm_{name}.gain"] if s.qk_norm and s.qk_norm_gain else x,
                place,
                layer[1],
            )

        s_qk = (
            (block["s_qk.stored"] * root_d).split(s.d_head) if s.s_qk else None
        )  # init 1, scale 1/√d
        q, k, v = project(h, ids, block, s, turn, s_qk)
        v = [[nu_qkv * vector for vector in vectors] for vectors in v]
        attended = attend(
            q, k, v, [root_d * x for x in h], ids, block, layer, s, lambda x, name: unit(x)
        )
        after = []
        for h_i, a in zip(h, attended, strict=True):
            h_i = step(h_i, nu_p * (block["W_o.weight"] @ a), alpha_a)
            u, z = nu_uz * (block["W_u.weight"] @ h_i), off * sigma * (block["W_z.weight"] @ h_i)
            h_m = nu_d * (block["W_d.weight"] @ (off * nu_acf(sigma) * u * silu(root_d * z)))
            after.append(step(h_i, h_m, alpha_m))
        h = after
    s_z = parameters["s_z.stored"] * (s.s_z[0] / s.s_z[1])
    return torch.stack([s_z * (parameters["head.weight"] @ h_i) for h_i in h])


def run(
    architecture: Callable[..., Tensor], parameters: dict[str, Tensor], tokens: Tensor, document_ids: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """tokens (B, T) → logits (B, T, V), and the embedded input (B, T, d), which keeps its gradient."""
    embedded = parameters["embedding.weight"][tokens]
    embedded.retain_grad()
    ids = [None] * len(tokens) if document_ids is None else document_ids.tolist()
    logits = [
        architecture(parameters, list(h), row, settings)
        for h, row in zip(embedded, ids, strict=True)
    ]
    return torch.stack(logits), embedded

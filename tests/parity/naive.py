"""The three architectures written out from their formulas: the oracle of the parity tests.

Slow on purpose: loops over sequences, positions, heads, queries and keys on single vectors. The
constants are worked out a second time, and nothing is imported from anlit. Parameters come as a
dict from the model's names to float64 tensors, so that gradients can be compared name by name.

Letters: d width, D head width, H heads, f width of the MLP, L layers; W of shape (out, in).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Vectors = list[Tensor]
"""A vector per position."""

Heads = list[Vectors]
"""Per position, a vector per head."""

Ids = Sequence[int] | None
"""The document of each position; None for a single document."""


class Pair(NamedTuple):
    """What the logit of a query i and a key j depends on."""

    score: Tensor  # S_ij
    t: int  # distance i − j
    n: int  # number of keys that query i sees
    head: int
    block: "Block"

    def learned(self, name: str) -> Tensor:
        """A mechanism's coefficient for this head: learned per head, or for the layer."""
        values = self.block.coefficient(name)
        return values[self.head] if len(values) > 1 else values[0]


Logit = Callable[[Pair], Tensor]
"""Pair → L_ij."""


class Layer(NamedTuple):
    """The attention of a layer."""

    logit: Logit
    frequencies: Sequence[float]  # radians per token of each rotated pair of dimensions
    window: int | None  # how many keys a query sees


@dataclass(frozen=True)
class Settings:
    """All of a model but its parameters."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_model: int
    d_ff: int
    layers: Sequence[Layer]
    qk_norm: bool
    norm_eps: float
    alpha: tuple[float, float]  # initial value and scale of the residual step sizes
    s_z: tuple[float, float]  # initial value and scale of the logits' scaling vector
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
    """A block's attention, and its parameters under their short names."""

    def __init__(self, parameters: dict[str, Tensor], number: int, layer: Layer) -> None:
        self.parameters = parameters
        self.prefix = f"blocks.{number}."
        self.layer = layer

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[self.prefix + name]

    def coefficient(self, name: str) -> Tensor:
        """A mechanism's learned coefficient, (H,) or (1,)."""
        path = f"attention.mechanism.{name}.value"
        if self.prefix + path not in self.parameters:  # inside a sliding window
            path = f"attention.mechanism.mechanism.{name}.value"
        return self[path]

    def learned_globally(self) -> Tensor:
        """The only coefficient that all layers share."""
        return self.parameters["shared_coefficients.0.value"][0]


# Positions: of the rotated dimensions, i turns with i + half.


def rope(d_head: int, fraction: float, base: float = 10_000.0) -> list[float]:
    width = int(d_head * fraction)
    exponents = [2 * i / width for i in range(width // 2)]
    return [base**-exponent for exponent in exponents]


def dynamic_ntk(
    d_head: int, fraction: float, stretch: float, base: float = 10_000.0
) -> list[float]:
    """RoPE with a base larger by stretch^(r/(r−2)): pair i is slower by stretch^(2i/(r−2))."""
    width = int(d_head * fraction)
    frequencies = []
    for i, frequency in enumerate(rope(d_head, fraction, base)):
        exponent = 2 * i / (width - 2)
        frequencies.append(frequency / stretch**exponent)
    return frequencies


def p_rope(d_head: int, base: float = 1024.0) -> list[float]:
    quarter = d_head // 4
    frequencies = [0.0] * (2 * quarter)
    for i in range(quarter):
        exponent = i / (quarter - 1)
        frequencies[i] = base**-exponent
    return frequencies


def position_in_document(position: int, ids: Ids) -> int:
    """Positions restart with each document that is masked."""
    if ids is None:
        return position
    return sum(ids[j] == ids[position] for j in range(position))


def rotate(x: Tensor, position: int, frequencies: Sequence[float]) -> Tensor:
    turned = list(x)
    half = len(frequencies)
    for i, frequency in enumerate(frequencies):
        cos = math.cos(position * frequency)
        sin = math.sin(position * frequency)
        turned[i] = cos * x[i] - sin * x[i + half]
        turned[i + half] = sin * x[i] + cos * x[i + half]
    return torch.stack(turned)


# Functions of a vector


def unit(x: Tensor) -> Tensor:
    return x / (x @ x) ** 0.5


def rms(x: Tensor, eps: float) -> Tensor:
    return x / ((x @ x) / len(x) + eps) ** 0.5


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def heads(weight: Tensor, x: Tensor, n_heads: int) -> Vectors:
    """W x, cut into a vector per head: head h has rows h·D … (h+1)·D of W."""
    d_head = weight.shape[0] // n_heads
    vectors = []
    for h in range(n_heads):
        rows = weight[h * d_head : (h + 1) * d_head]
        vectors.append(rows @ x)
    return vectors


def shared(vectors: Vectors, head: int, s: Settings) -> Tensor:
    """The key or value of a query head: n_heads/n_kv_heads query heads in a row have the same."""
    return vectors[head // (s.n_heads // len(vectors))]


# Attention


Norm = Callable[[Tensor, str], Tensor]
"""(vector, name of its gain) → the vector, normalised as the architecture does."""

Turn = Callable[[Tensor, str, int], Tensor]
"""(W x of a head, "q" or "k", position in the document) → query or key, normalised and rotated."""


def project(
    xs: Vectors,
    ids: Ids,
    block: Block,
    s: Settings,
    turn: Turn,
    s_qk: Sequence[Tensor] | None = None,
) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values of each position and head.

    `s_qk` has a vector for each head of queries, which multiplies the keys that heads share, too.
    """
    q: Heads = []
    k: Heads = []
    v: Heads = []
    for position, x in enumerate(xs):
        document_position = position_in_document(position, ids)
        W_q_x = heads(block["W_q.weight"], x, s.n_heads)
        W_k_x = heads(block["W_k.weight"], x, s.n_kv_heads)
        queries = [turn(y, "q", document_position) for y in W_q_x]
        keys = [turn(y, "k", document_position) for y in W_k_x]
        if s_qk is not None:
            scaled_keys = []
            for head in range(s.n_heads):
                queries[head] = queries[head] * s_qk[head]
                scaled_keys.append(shared(keys, head, s) * s_qk[head])
            keys = scaled_keys
        q.append(queries)
        k.append(keys)
        v.append(heads(block["W_v.weight"], x, s.n_kv_heads))
    return q, k, v


def is_visible(query: int, key: int, ids: Ids, window: int | None) -> bool:
    if ids is not None and ids[key] != ids[query]:
        return False
    if window is not None and query - key >= window:
        return False
    return key <= query


def attend(
    q: Heads,
    k: Heads,
    v: Heads,
    x: Vectors,
    ids: Ids,
    block: Block,
    s: Settings,
    norm: Norm,
) -> Vectors:
    """Per position, the heads' averages of v side by side, as they go into W_o. Gates read `x`."""
    outputs = []
    for i in range(len(q)):
        visible = [j for j in range(i + 1) if is_visible(i, j, ids, block.layer.window)]
        averages = []
        for h in range(s.n_heads):
            weighted_sum = torch.zeros_like(v[0][0])
            total = 0.0
            for j in visible:
                key = shared(k[j], h, s)
                value = shared(v[j], h, s)
                if s.v_norm:
                    value = norm(value, "norm_v")
                score = q[i][h] @ key / math.sqrt(s.d_head)
                pair = Pair(score, i - j, len(visible), h, block)
                weight = torch.exp(block.layer.logit(pair))
                weighted_sum = weighted_sum + weight * value
                total = total + weight
            average = weighted_sum / total
            if s.attention_norm:
                average = norm(average, "output.norm")
            averages.append(average)
        output = torch.cat(averages)
        if s.gated:
            output = output * gates(block, x[i], len(output))
        outputs.append(output)
    return outputs


def gates(block: Block, x: Tensor, width: int) -> Tensor:
    """2σ(W_g x): a gate per element, or a gate per head for all elements of the head."""
    gate = 2 / (1 + torch.exp(-block["output.W_g.weight"] @ x))
    n_elements = width // len(gate)
    return gate.repeat_interleave(n_elements)


def nu_acf(sigma: float) -> float:
    """1/√E[SiLU(σx)²] for x ~ N(0, 1), by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    values = sigma * nodes
    silu_values = values / (1 + np.exp(-values))
    mean_square = (weights * silu_values**2).sum() / math.sqrt(2 * math.pi)
    return float(1 / np.sqrt(mean_square))


def unit_norm(x: Tensor, name: str) -> Tensor:
    """The norm of nGPT and anGPT, without a gain."""
    return unit(x)


# Architectures: h of a sequence → its logits


def gpt(parameters: dict[str, Tensor], h: Vectors, ids: Ids, s: Settings) -> Tensor:
    for number, layer in enumerate(s.layers):
        block = Block(parameters, number, layer)
        h = gpt_block(block, h, ids, s)
    logits = []
    for h_i in h:
        x = rms(h_i, s.norm_eps) * parameters["norm_f.gain"]
        logits.append(parameters["head.weight"] @ x)
    return torch.stack(logits)


def gpt_block(block: Block, h: Vectors, ids: Ids, s: Settings) -> Vectors:
    qk_eps = s.norm_eps if s.qk_norm_eps is None else s.qk_norm_eps

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, s.norm_eps) * block[f"{name}.gain"]

    def turn(x: Tensor, name: str, position: int) -> Tensor:
        if s.qk_norm:
            x = rms(x, qk_eps)
            if s.qk_norm_gain is not False:
                x = x * block[f"norm_{name}.gain"]
        return rotate(x, position, block.layer.frequencies)

    xs = [norm(h_i, "norm_1") for h_i in h]
    q, k, v = project(xs, ids, block, s, turn)
    attended = attend(q, k, v, xs, ids, block, s, norm)
    new_h = []
    for h_i, a in zip(h, attended, strict=True):
        update = block["W_o.weight"] @ a
        if s.post_norm:
            update = norm(update, "post_norm_A")
        h_i = h_i + update
        x = norm(h_i, "norm_2")
        u = block["W_u.weight"] @ x
        z = block["W_z.weight"] @ x
        update = block["W_d.weight"] @ (u * silu(z))
        if s.post_norm:
            update = norm(update, "post_norm_M")
        new_h.append(h_i + update)
    return new_h


def normalised_logits(parameters: dict[str, Tensor], h: Vectors, s: Settings) -> Tensor:
    """The logits of nGPT and anGPT."""
    init, scale = s.s_z
    s_z = parameters["s_z.stored"] * (init / scale)
    logits = []
    for h_i in h:
        x = parameters["head.weight"] @ h_i
        logits.append(s_z * x)
    return torch.stack(logits)


def alpha_of(block: Block, name: str, s: Settings) -> Tensor:
    init, scale = s.alpha
    return block[f"{name}.stored"] * (init / scale)


def ngpt(parameters: dict[str, Tensor], h: Vectors, ids: Ids, s: Settings) -> Tensor:
    for number, layer in enumerate(s.layers):
        block = Block(parameters, number, layer)
        h = ngpt_block(block, h, ids, s)
    return normalised_logits(parameters, h, s)


def ngpt_block(block: Block, h: Vectors, ids: Ids, s: Settings) -> Vectors:
    root_d = math.sqrt(s.d_model)
    alpha_a = alpha_of(block, "alpha_A", s).abs()
    alpha_m = alpha_of(block, "alpha_M", s).abs()

    def turn(x: Tensor, name: str, position: int) -> Tensor:
        # Softmax scale √D on unit vectors, over the 1/√D in `attend`: √D on q and on k.
        # Without QK-norm √d on both; a finite ε is relative to it (the package's choices).
        x = rotate(x, position, block.layer.frequencies)
        if not s.qk_norm:
            return x * root_d
        if s.qk_norm_eps:
            return rms(x * root_d, s.qk_norm_eps)
        return unit(x) * math.sqrt(s.d_head)

    s_qk = None
    if s.qk_norm_gain is not False:
        s_qk = (block["s_qk.stored"] * root_d).split(s.d_head)  # init 1, scale 1/√d
    q, k, v = project(h, ids, block, s, turn, s_qk)
    gate_inputs = [root_d * x for x in h]
    attended = attend(q, k, v, gate_inputs, ids, block, s, unit_norm)
    new_h = []
    for h_i, a in zip(h, attended, strict=True):
        h_a = unit(block["W_o.weight"] @ a)
        h_i = unit(h_i + alpha_a * (h_a - h_i))
        u = block["s_u.stored"] * (block["W_u.weight"] @ h_i)
        z = root_d * block["s_v.stored"] * (block["W_z.weight"] @ h_i)
        h_m = unit(block["W_d.weight"] @ (u * silu(z)))
        new_h.append(unit(h_i + alpha_m * (h_m - h_i)))
    return new_h


def angpt(parameters: dict[str, Tensor], h: Vectors, ids: Ids, s: Settings) -> Tensor:
    for number, layer in enumerate(s.layers):
        block = Block(parameters, number, layer)
        h = angpt_block(block, h, ids, s)
    return normalised_logits(parameters, h, s)


def angpt_block(block: Block, h: Vectors, ids: Ids, s: Settings) -> Vectors:
    root_d = math.sqrt(s.d_model)
    scale = 1 + s.error
    nu_qkv = scale * math.sqrt(s.d_model / s.d_head)
    nu_p = scale * math.sqrt(s.d_head / s.d_model)
    nu_uz = scale * math.sqrt(s.d_model / s.d_ff)
    nu_d = scale * math.sqrt(s.d_ff / s.d_model)
    sigma = math.sqrt(s.d_model / s.d_ff) if s.silu_std is None else s.silu_std
    alpha_a = alpha_of(block, "alpha_A", s)
    alpha_m = alpha_of(block, "alpha_M", s)

    def step(h: Tensor, suggestion: Tensor, alpha: Tensor) -> Tensor:
        if s.post_norm:
            suggestion = unit(suggestion)
        h = h + alpha * (suggestion - h)
        if not s.residual_factor:
            return h
        nu = (alpha**2 + (1 - alpha) ** 2) ** -0.5
        return nu * h

    def turn(x: Tensor, name: str, position: int) -> Tensor:
        # q and k get root mean square 1 by √D (the package's choice): without QK-norm, and if a
        # finite ε is added to the mean square. A gain comes before the rotation.
        x = nu_qkv * x
        if not s.qk_norm:
            x = x * math.sqrt(s.d_head)
        elif s.qk_norm_eps is None:
            x = rms(x, s.norm_eps)
        else:
            x = rms(x * math.sqrt(s.d_head), s.qk_norm_eps)
        if s.qk_norm and s.qk_norm_gain:
            x = x * block[f"norm_{name}.gain"]
        return rotate(x, position, block.layer.frequencies)

    s_qk = None
    if s.s_qk:
        s_qk = (block["s_qk.stored"] * root_d).split(s.d_head)  # init 1, scale 1/√d
    q, k, v = project(h, ids, block, s, turn, s_qk)
    for values in v:
        values[:] = [nu_qkv * value for value in values]
    gate_inputs = [root_d * x for x in h]
    attended = attend(q, k, v, gate_inputs, ids, block, s, unit_norm)
    new_h = []
    for h_i, a in zip(h, attended, strict=True):
        h_a = nu_p * (block["W_o.weight"] @ a)
        h_i = step(h_i, h_a, alpha_a)
        u = nu_uz * (block["W_u.weight"] @ h_i)
        z = scale * sigma * (block["W_z.weight"] @ h_i)
        nu = scale * nu_acf(sigma)
        activation = nu * u * silu(root_d * z)
        h_m = nu_d * (block["W_d.weight"] @ activation)
        new_h.append(step(h_i, h_m, alpha_m))
    return new_h


def run(
    architecture: Callable[..., Tensor],
    parameters: dict[str, Tensor],
    tokens: Tensor,
    document_ids: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """tokens (B, T) → logits (B, T, V), and the embedded input (B, T, d) with its gradient."""
    embedded = parameters["embedding.weight"][tokens]
    embedded.retain_grad()
    ids = [None] * len(tokens) if document_ids is None else document_ids.tolist()
    logits = []
    for h, row_ids in zip(embedded, ids, strict=True):
        logits.append(architecture(parameters, list(h), row_ids, settings))
    return torch.stack(logits), embedded

"""The attention of anlit's models for transformers: positions of tokens, rotations and mechanisms.

An export copies this file beside the weights, and transformers runs it. So it may not import anlit.
It must give the same numbers as anlit's attention.

Logits are L_ij = a(i−j) · g(n_i) · S_ij + m(i−j), with S_ij = q_i·k_j/√D. Query i may see n_i keys.

Shape letters: B batch, H heads of queries, G heads of keys and values, T queries, S keys, D head
width, R rotated width. The keys are the keys in the cache and the T new keys.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

EULER_GAMMA = 0.5772156649015329


class GeneralForm(NamedTuple):
    """The functions of a mechanism at given n_i and t = i − j. The defaults are plain attention.

    A constant function is a number.
    """

    g: Any = 1.0
    """g(n), (B, H or 1, T, 1)."""
    a: Any = 1.0
    """a(t), (B, H or 1, T, S)."""
    m: Any = 0.0
    """m(t), (B, H or 1, T, S)."""


class TokenPositions(NamedTuple):
    """The positions of a batch's queries and keys, for all layers. B is 1 if all rows are equal.

    It is a tuple of tensors, because accelerate moves tuples to the device of each layer.
    """

    queries: Tensor
    """Positions for the rotation, (B, T): the number of tokens before in the document."""
    slots: Tensor
    """The index of each query's own key among all keys, (T,)."""
    distance: Tensor
    """i − j, (B, 1, T, S), in float32."""
    visible: Tensor
    """Whether query i may see key j, (B, 1, T, S)."""

    def limit_to_window(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Whether query i sees key j, (B, 1, T, S), and n_i, (B, 1, T, 1).

        A query sees `window` keys at most, including its token's; None: all.
        """
        n = self.visible.sum(-1, keepdim=True).float()
        if window is None:
            return self.visible, n
        return self.visible & (self.distance < window), n.clamp_max(window)


def count_positions(
    h: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: Any
) -> TokenPositions:
    """Count the positions of the tokens h (B, T, d), after the tokens in the cache `past`.

    `attention_mask` (B, S) is 0 for tokens to leave out. They are not counted. No other token sees
    them.

    Raises:
        ValueError: `position_ids` (B or 1, T) count in another way.
    """
    n_queries = h.shape[1]
    n_past = 0 if past is None else past.get_seq_length()
    slots = torch.arange(n_queries, device=h.device) + n_past
    n_keys = n_past + n_queries
    for layer in getattr(past, "layers", ()):
        if layer.is_compileable:  # a static cache: it has room for all keys from the start
            n_keys = layer.max_cache_len
            break
    keys = torch.arange(n_keys, device=h.device)
    visible = keys <= slots[:, None]
    if attention_mask is None:
        is_counted = torch.ones_like(keys, dtype=torch.bool)[None]
    else:
        check_length(attention_mask, n_past + n_queries)
        is_counted = pad(attention_mask.bool(), (0, n_keys - attention_mask.shape[1]))
        # A padded query sees itself, or its output would be NaN.
        visible = visible & (is_counted[:, None] | (keys == slots[:, None]))
    key_positions = is_counted.long().cumsum(-1) - 1
    queries = key_positions[:, slots].clamp_min(0)
    if position_ids is not None:
        check_positions(position_ids, queries, slots, is_counted[:, slots])
    distance = (queries[:, :, None] - key_positions[:, None]).clamp_min(0).float()
    return TokenPositions(queries, slots, distance[:, None], visible.expand_as(distance)[:, None])


def check_length(attention_mask: Tensor, n_tokens: Any) -> None:
    """Raise ValueError unless the mask has a column for each of `n_tokens` tokens.

    Nothing is checked while torch compiles, where a branch on a tensor breaks the graph.
    """
    if torch.compiler.is_compiling():
        return
    if attention_mask.shape[1] != n_tokens:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns for {int(n_tokens)} tokens: "
            "give a column for each token, including the tokens in the cache"
        )


def check_positions(
    position_ids: Tensor, positions: Tensor, slots: Tensor, is_counted: Tensor
) -> None:
    """Raise ValueError if `position_ids` (B or 1, T) are neither `positions` nor `slots`.

    `slots` (T,) count padding, `positions` (B, T) do not. Both are right. They differ by a constant
    per row, and logits depend on differences of positions only. `is_counted` (B, T) is False for
    padding. Its position does not matter.
    """
    if torch.compiler.is_compiling():
        return
    equals_positions = ((position_ids == positions) | ~is_counted).all(-1)
    equals_slots = ((position_ids == slots) | ~is_counted).all(-1)
    if not (equals_positions | equals_slots).all():
        raise ValueError(
            "position_ids must count the tokens that attention_mask keeps, after the tokens in the "
            "cache: leave them out; for packed documents, leave out attention_mask and cache"
        )


def separate_documents(position_ids: Tensor) -> TokenPositions:
    """The positions of packed documents.

    A document begins wherever `position_ids` (B, T) do not go up by 1.
    """
    slots = torch.arange(position_ids.shape[1], device=position_ids.device)
    begins = position_ids.diff(prepend=position_ids[:, :1]) != 1
    first_slot = torch.where(begins, slots, 0).cummax(-1).values
    visible = (slots <= slots[:, None]) & (slots >= first_slot[:, :, None])
    distance = (slots[:, None] - slots).clamp_min(0).float().expand(visible.shape)
    return TokenPositions(slots - first_slot, slots, distance[:, None], visible[:, None])


def rotate(x: Tensor, rotation: dict[str, Any], positions: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of x (B, H, T, D).

    `positions` are (B, T). `rotation` has the frequency of each pair in radians per token. Without
    frequencies nothing rotates. Its `scale` multiplies the rotated dimensions (YaRN's attention
    factor).
    """
    half = len(rotation["frequencies"])
    if not half:
        return x
    frequency = torch.tensor(rotation["frequencies"], dtype=torch.float64, device=x.device)
    # In float64: in float32 the angles at position 16,384 are wrong by up to 0.001 radians.
    angles = positions[:, None, :, None].double() * frequency
    cos = (rotation["scale"] * angles.cos()).float()
    sin = (rotation["scale"] * angles.sin()).float()
    first, second, unrotated = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, unrotated), dim=-1).to(x.dtype)


def general_form(
    mechanism: dict[str, Any], n: Tensor, t: Tensor, n_heads: int, d_head: int
) -> GeneralForm:
    """Evaluate g, a and m of a mechanism at n (B, 1, T, 1) and t (B, 1, T, S).

    `mechanism` is the layer's entry of config.json: the `name` of anlit's class, its settings, and

    - `strength`: the coefficient, learned or not. A list of H numbers, or of 1 for all heads.
    - `g`: the mechanism that gives LogBias its g(n).
    - `share`: p of a warm start. g becomes 1 + p(g − 1), a likewise, and m becomes pm.
    - `window`: read by `attend`.

    `Plain` has no case. The export refuses mechanisms that have no case here.
    """
    strength = torch.tensor(mechanism.get("strength", [1.0]), device=n.device)
    strength = strength[:, None, None]  # (H or 1, 1, 1)
    g, a, m = GeneralForm()
    match mechanism:
        case {"name": "LogN", "b": b, "c": c}:
            g = strength * torch.log(b * n + c)
        case {"name": "SqrtLogN", "a": offset, "b": b, "c": c}:
            g = strength * (offset + torch.sqrt(2 * torch.log(b * n + c)))
        case {"name": "BetaScaling"}:
            g = strength * n ** (2 / (d_head - 1))
        case {"name": "ExpectedMaximum"}:
            log_n = torch.log(n + 2)
            u = torch.sqrt(2 * log_n)
            g = u - (torch.log(log_n) + math.log(4 * math.pi) - 2 * EULER_GAMMA) / (2 * u)
        case {"name": "ScaleInvariant", "tau": tau}:
            a = torch.sqrt(2 * torch.log1p(t / tau) + 1)
            m = -strength * torch.log1p(t / tau)
        case {"name": "LogBias", "tau": tau, "g": inner}:
            g = general_form(inner, n, t, n_heads, d_head).g
            m = -torch.log1p(t / tau)
        case {"name": "ALiBi"}:
            m = -alibi_slopes(n_heads).to(t.device)[:, None, None] * t
    share = mechanism.get("share", 1.0)
    if share == 1:
        return GeneralForm(g, a, m)
    return GeneralForm(1.0 + share * (g - 1.0), 1.0 + share * (a - 1.0), share * m)


def alibi_slopes(n_heads: int) -> Tensor:
    """Slopes of ALiBi's heads, (H,).

    They are 2^(−8h/P) for h = 1 … P, with P the largest power of two in H, then 2^(−8h/2P) for
    h = 1, 3, 5 …
    """
    power = 2 ** int(math.log2(n_heads))
    first_heads = (1 + torch.arange(power)) / power
    further_heads = (1 + 2 * torch.arange(n_heads - power)) / (2 * power)
    return 2 ** (-8 * torch.cat((first_heads, further_heads)))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: dict[str, Any], tokens: TokenPositions
) -> Tensor:
    """softmax(a·g·S + m) v, (B, H, T, D), of q (B, H, T, D), k and v (B, G, S, D).

    Each key and value is shared by H/G heads.
    """
    n_heads = q.shape[1]
    d_head = q.shape[-1]
    k = k.repeat_interleave(n_heads // k.shape[1], dim=1)
    v = v.repeat_interleave(n_heads // v.shape[1], dim=1)
    visible, n = tokens.limit_to_window(mechanism.get("window"))
    g, a, m = general_form(mechanism, n, tokens.distance, n_heads, d_head)
    q = (q * g).to(q.dtype)
    bias = torch.where(visible, m, float("-inf"))
    if isinstance(a, float):  # 1, so scores need no factor per key, and a fused kernel will do
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    logits = torch.addcmul(bias, (q @ k.mT * d_head**-0.5).float(), a)
    return logits.softmax(-1).to(v.dtype) @ v

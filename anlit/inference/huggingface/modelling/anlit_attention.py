"""Attention of anlit's models for transformers: positions, mechanisms and visible keys.

Logits are L_ij = a(i−j) · g(n_i) · S_ij + m(i−j), S_ij = q_i·k_j/√D, n_i the number of keys that query i may see.
Shape letters: B batch, H heads of queries, G of keys and values, T queries, S keys, D head width, R rotated width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

EULER_GAMMA = 0.5772156649015329


class TokenPositions:
    """The positions of a batch's tokens, from 0, not counting tokens that `attention_mask` (B, S) leaves out."""

    def __init__(self, attention_mask: Tensor | None, n_queries: int, n_keys: int, device: torch.device) -> None:
        index = torch.arange(n_keys, device=device)
        self.keys = index[None]
        visible = index <= index[-n_queries:, None]
        if attention_mask is not None and not attention_mask.all():
            self.keys = attention_mask.long().cumsum(-1) - 1
            itself = index == index[-n_queries:, None]  # a padded query sees itself, or its output would be NaN
            visible = visible & (attention_mask[:, None].bool() | itself)
        self.queries = self.keys[:, -n_queries:].clamp_min(0)
        self.distance = (self.queries[:, :, None] - self.keys[:, None]).clamp_min(0)[:, None].float()  # (B, 1, T, S)
        self.visible = visible.expand(len(self.keys), -1, -1)[:, None]

    def seen(self, window: int | None) -> Tensor:
        """Whether query i sees key j: (B, 1, T, S)."""
        return self.visible if window is None else self.visible & (self.distance < window)

    def n_visible(self, window: int | None) -> Tensor:
        """n_i, (B, 1, T)."""
        n = self.queries[:, None] + 1
        return (n if window is None else n.clamp_max(window)).float()


def rotate(x: Tensor, rotation: dict[str, Any], index: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R/2) of the first R dimensions of x (B, H, T, D); index (B, T) are the positions.

    `rotation` has the frequency of each pair in radians per token, and what the rotated dimensions are multiplied by.
    """
    half = len(rotation["frequencies"])
    if not half:
        return x
    frequency = torch.tensor(rotation["frequencies"], dtype=torch.float64, device=x.device)
    angles = index[:, None, :, None].double() * frequency
    cos, sin = ((rotation["scale"] * part).float() for part in (angles.cos(), angles.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def gain(mechanism: dict[str, Any], n: Tensor, d_head: int) -> Tensor | None:
    """g(n) for n (B, 1, T), (B, H or 1, T); None if it is 1."""
    name = mechanism["name"]
    strength = torch.tensor(mechanism.get("strength", [1.0]), device=n.device)[:, None]  # (H or 1, 1)
    if name == "LogN":
        return strength * torch.log(mechanism["b"] * n + mechanism["c"])
    if name == "SqrtLogN":
        return strength * (mechanism["a"] + torch.sqrt(2 * torch.log(mechanism["b"] * n + mechanism["c"])))
    if name == "BetaScaling":
        return strength * n ** (2 / (d_head - 1))
    if name == "ExpectedMaximum":
        log_n = torch.log(n + 2)
        u = torch.sqrt(2 * log_n)
        return u - (torch.log(log_n) + math.log(4 * math.pi) - 2 * EULER_GAMMA) / (2 * u)
    if name == "LogBias":
        return gain(mechanism["g"], n, d_head)
    return None


def distance_gain(mechanism: dict[str, Any], t: Tensor) -> Tensor | None:
    """a(t) for t (B, 1, T, S); None if it is 1."""
    if mechanism["name"] == "ScaleInvariant":
        return torch.sqrt(2 * torch.log1p(t / mechanism["tau"]) + 1)
    return None


def distance_bias(mechanism: dict[str, Any], t: Tensor, n_heads: int) -> Tensor | None:
    """m(t) for t (B, 1, T, S), (B, H or 1, T, S); None if it is 0."""
    name = mechanism["name"]
    if name == "ScaleInvariant":
        decay = torch.tensor(mechanism["strength"], device=t.device)[:, None, None]
        return -decay * torch.log1p(t / mechanism["tau"])
    if name == "LogBias":
        return -torch.log1p(t / mechanism["tau"])
    if name == "ALiBi":
        heads = torch.arange(1, n_heads + 1, device=t.device, dtype=t.dtype)[:, None, None]
        return -(2 ** (-8 * heads / n_heads)) * t
    return None


def _shared(start: float, end: Tensor | None, share: float) -> Tensor | None:
    return end if end is None or share == 1 else start + share * (end - start)


def attend(q: Tensor, k: Tensor, v: Tensor, mechanism: dict[str, Any], tokens: TokenPositions) -> Tensor:
    """softmax(a·g·S + m) v: q (B, H, T, D), k and v (B, G, S, D), each shared by H/G heads → (B, H, T, D)."""
    n_heads, d_head = q.shape[1], q.shape[-1]
    k, v = (x.repeat_interleave(n_heads // x.shape[1], dim=1) for x in (k, v))
    window, share = mechanism.get("window"), mechanism.get("share", 1.0)  # the share of a mechanism in a warm start
    g = _shared(1, gain(mechanism, tokens.n_visible(window), d_head), share)
    q = q if g is None else q * g[..., None].to(q.dtype)
    a = _shared(1, distance_gain(mechanism, tokens.distance), share)
    m = _shared(0, distance_bias(mechanism, tokens.distance, n_heads), share)
    bias = torch.where(tokens.seen(window), torch.zeros((), device=q.device) if m is None else m, float("-inf"))
    if a is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    logits = torch.addcmul(bias, (q @ k.mT * d_head**-0.5).float(), a)
    return logits.softmax(-1).to(v.dtype) @ v


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖₂ over the last axis."""
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return (wide / norm.clamp_min(torch.finfo(torch.float32).tiny)).to(x.dtype)


class UnitNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return unit(x)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · gain over the last axis."""

    def __init__(self, width: int, eps: float, has_gain: bool = True) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.gain = nn.Parameter(torch.ones(width)) if has_gain else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), (self.width,), self.gain, self.eps).to(x.dtype)


class AttentionOutput(nn.Module):
    """The input of W_o, (B, T, H·D): the heads' averages (B, H, T, D) with norm and gates, concatenated."""

    def __init__(self, config: Any, norm: nn.Module) -> None:
        super().__init__()
        self.n_heads, self.norm = config.num_attention_heads, norm
        n_gates = {"none": 0, "per_head": self.n_heads, "per_element": self.n_heads * config.head_dim}[config.gate]
        self.W_g = nn.Linear(config.hidden_size, n_gates, bias=False) if n_gates else None

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        attended = self.norm(attended)
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))
            attended = attended * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return attended.transpose(1, 2).flatten(2)

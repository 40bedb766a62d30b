"""anlit's models for transformers: GPT+, nGPT and anGPT with their positions, mechanisms and visible keys.

It needs torch and transformers but not anlit. nGPT and anGPT are folded: what multiplies rows of matrices is in them.

Logits are L_ij = a(i−j) · g(n_i) · S_ij + m(i−j), S_ij = q_i·k_j/√D, n_i the number of keys that query i may see.
Shape letters: B batch, H heads of queries, G of keys and values, T queries, S keys, D head width, R rotated width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

EULER_GAMMA = 0.5772156649015329
PLAIN: tuple[Any, Any, Any] = (1.0, 1.0, 0.0)
"""g, a and m of plain attention."""


class TokenPositions:
    """The positions of a batch's tokens, from 0, not counting tokens that `attention_mask` (B, S) leaves out."""

    def __init__(
        self, attention_mask: Tensor | None, n_queries: int, n_keys: int, device: torch.device
    ) -> None:
        index = torch.arange(n_keys, device=device)
        self.keys = index[None]
        visible = index <= index[-n_queries:, None]
        if attention_mask is not None and not attention_mask.all():
            self.keys = attention_mask.long().cumsum(-1) - 1
            itself = (
                index == index[-n_queries:, None]
            )  # a padded query sees itself, or its output would be NaN
            visible = visible & (attention_mask[:, None].bool() | itself)
        self.queries = self.keys[:, -n_queries:].clamp_min(0)
        self.distance = (
            (self.queries[:, :, None] - self.keys[:, None]).clamp_min(0)[:, None].float()
        )  # (B, 1, T, S)
        self.visible = visible.expand(len(self.keys), -1, -1)[:, None]

    def seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Whether query i sees key j, (B, 1, T, S), and n_i, (B, 1, T, 1)."""
        n = (self.queries[:, None, :, None] + 1).float()
        return (
            (self.visible, n)
            if window is None
            else (self.visible & (self.distance < window), n.clamp_max(window))
        )


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
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(
        x.dtype
    )


def general_form(
    mechanism: dict[str, Any], n: Tensor, t: Tensor, n_heads: int, d_head: int
) -> list[Any]:
    """g(n) (B, H or 1, T, 1), a(t) and m(t) (B, H or 1, T, S), for n (B, 1, T, 1) and t (B, 1, T, S).

    A function that is constant is a number. With a share p, in a warm start, g and a are 1 + p(g − 1), m is pm.
    """
    strength = torch.tensor(mechanism.get("strength", [1.0]), device=n.device)[
        :, None, None
    ]  # (H or 1, 1, 1)
    g, a, m = PLAIN
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
            a, m = torch.sqrt(2 * torch.log1p(t / tau) + 1), -strength * torch.log1p(t / tau)
        case {"name": "LogBias", "tau": tau, "g": inner}:
            g, m = general_form(inner, n, t, n_heads, d_head)[0], -torch.log1p(t / tau)
        case {"name": "ALiBi"}:
            heads = torch.arange(1, n_heads + 1, device=t.device, dtype=t.dtype)[:, None, None]
            m = -(2 ** (-8 * heads / n_heads)) * t
    share = mechanism.get("share", 1.0)
    return [
        end if share == 1 else start + share * (end - start)
        for start, end in zip(PLAIN, (g, a, m), strict=True)
    ]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mechanism: dict[str, Any], tokens: TokenPositions
) -> Tensor:
    """softmax(a·g·S + m) v: q (B, H, T, D), k and v (B, G, S, D), each shared by H/G heads → (B, H, T, D)."""
    n_heads, d_head = q.shape[1], q.shape[-1]
    k, v = (x.repeat_interleave(n_heads // x.shape[1], dim=1) for x in (k, v))
    visible, n = tokens.seen(mechanism.get("window"))
    g, a, m = general_form(mechanism, n, tokens.distance, n_heads, d_head)
    q = (q * g).to(q.dtype)
    bias = torch.where(visible, m, float("-inf"))
    if isinstance(a, float):
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
        n_gates = {
            "none": 0,
            "per_head": self.n_heads,
            "per_element": self.n_heads * config.head_dim,
        }[config.gate]
        self.W_g = nn.Linear(config.hidden_size, n_gates, bias=False) if n_gates else None

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        attended = self.norm(attended)
        if self.W_g is not None:
            gate = 2 * torch.sigmoid(self.W_g(x))
            attended = attended * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return attended.transpose(1, 2).flatten(2)


class AnlitConfig(PretrainedConfig):
    """Sizes under transformers' names, mechanism and rotation of each layer, and settings of the blocks.

    `positions` has the number of each layer's rotation in `rotations`.

    Each architecture has a subclass, because transformers finds the model by the class of its configuration.
    """

    vocab_size: int = 50_304
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 0
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    max_position_embeddings: int = 2048
    mechanisms: Any = None
    positions: Any = None
    rotations: Any = None
    qk_norm: dict[str, Any] | None = None
    norm_eps: float = 1e-6
    v_norm: bool = False
    output_norm: bool = False
    post_norm: bool = False
    gate: str = "none"
    use_cache: bool = True
    tie_word_embeddings: bool = False


class AnlitBlock(nn.Module):
    """The maps of a block, and what differs from layer to layer."""

    norm_v: nn.Module
    output: nn.Module

    def __init__(self, config: AnlitConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.d_head = layer, config.head_dim
        self.mechanism, self.rotation = (
            config.mechanisms[layer],
            config.rotations[config.positions[layer]],
        )
        d, f = config.hidden_size, config.intermediate_size
        q, kv = (
            config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        shapes = ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d))
        maps = (nn.Linear(*shape, bias=False) for shape in shapes)
        self.W_q, self.W_k, self.W_v, self.W_o, self.W_u, self.W_z, self.W_d = maps
        norm = config.qk_norm  # nGPT has one after RoPE
        norms = (
            RMSNorm(self.d_head, norm["eps"], norm["gain"]) if norm else nn.Identity()
            for _ in range(2)
        )
        self.norm_q, self.norm_k = norms

    def turned(self, q: Tensor, k: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with norm and rotation for positions `index` (B, T), the norm before RoPE."""
        return rotate(self.norm_q(q), self.rotation, index), rotate(
            self.norm_k(k), self.rotation, index
        )

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        """W_o · Attn(q, k, v) of h (B, T, d), after the keys and values of the cache."""
        maps = (self.W_q, self.W_k, self.W_v)
        q, k, v = (
            W(h).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for W in maps
        )  # (B, heads, T, D)
        q, k = self.turned(q, k, tokens.queries)
        v = self.norm_v(v)
        k, v = (k, v) if past is None else past.update(k, v, self.layer)
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))

    def mlp(self, h: Tensor) -> Tensor:
        return self.W_d(self.W_u(h) * silu(self.W_z(h)))


class AnlitForCausalLM(PreTrainedModel, GenerationMixin):
    """tokens (B, T) → logits (B, T, V). A subclass names its block."""

    block_class: Any
    has_final_norm = False
    _input_embed_layer = "embedding"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012  # if tie_word_embeddings
    _supports_sdpa = True
    accepts_loss_kwargs = False  # the Trainer divides the loss of accumulated batches itself

    def __init__(self, config: AnlitConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            self.block_class(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm_f = (
            RMSNorm(config.hidden_size, config.norm_eps) if self.has_final_norm else nn.Identity()
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None,
        labels: Tensor | None = None, logits_to_keep: int = 0, **rest: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Positions count only tokens that `attention_mask` (B, S) keeps, so batches are padded on the left.

        The argument with the cache is `cache` from transformers 5.24 on, before it `past_key_values`.
        """
        for name in ("output_hidden_states", "output_attentions", "inputs_embeds"):
            if rest.get(name) is not None and rest[name] is not False:
                raise ValueError(f"{name} is not supported by this model")
        past = next((value for value in rest.values() if isinstance(value, Cache)), None)
        if past is None and (self.config.use_cache if use_cache is None else use_cache):
            past = DynamicCache()
        n_keys = input_ids.shape[1] + (0 if past is None else past.get_seq_length())
        tokens = TokenPositions(attention_mask, input_ids.shape[1], n_keys, input_ids.device)
        h = self.embedding(input_ids)
        for block in self.blocks:
            h = block(h, tokens, past)
        logits = self.head(self.norm_f(h[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss, logits, past)


class GPTConfig(AnlitConfig):
    model_type = "anlit_gpt"


class GPTBlock(AnlitBlock):
    """GPT+ with settings that no architecture of transformers has.

    h ← h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁;  q, k → rms·gain → RoPE
    h ← h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
    logits = W_head (rms(h)·g_f)
    """

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d, eps = config.hidden_size, config.norm_eps
        self.norm_1, self.norm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        self.norm_v = RMSNorm(self.d_head, eps) if config.v_norm else nn.Identity()
        self.output = AttentionOutput(
            config, RMSNorm(self.d_head, eps) if config.output_norm else nn.Identity()
        )
        self.post_norm_A, self.post_norm_M = (
            RMSNorm(d, eps) if config.post_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = h + self.post_norm_A(self.attend(self.norm_1(h), tokens, past))
        return h + self.post_norm_M(self.mlp(self.norm_2(h)))


class GPTForCausalLM(AnlitForCausalLM):
    config_class = GPTConfig
    block_class = GPTBlock
    has_final_norm = True


class NGPTConfig(AnlitConfig):
    model_type = "anlit_ngpt"


class NGPTBlock(AnlitBlock):
    """nGPT (arXiv 2410.01131), folded: s_u, √d s_v and s_z are in the matrices.

    q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head
    h ← unit(h + α_A ∘ (unit(W_o · Attn(q, k, v)) − h))
    h ← unit(h + α_M ∘ (unit(W_d (u ∘ SiLU(z))) − h))      u = W_u h, z = W_z h
    logits = W_head h
    """

    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
        self.alpha_A, self.alpha_M = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.s_qk = nn.Parameter(torch.ones(self.W_q.out_features))
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm:
            eps = config.qk_norm["eps"]
            self.norm_qk = RMSNorm(self.d_head, eps, has_gain=False) if eps else UnitNorm()
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = AttentionOutput(config, UnitNorm() if config.output_norm else nn.Identity())

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = unit(torch.lerp(h, unit(self.attend(h, tokens, past)), self.alpha_A))
        return unit(torch.lerp(h, unit(self.mlp(h)), self.alpha_M))

    def turned(self, q: Tensor, k: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (self.norm_qk(rotate(y, self.rotation, index)) for y in (q, k))
        s_qk = self.s_qk.view(-1, 1, self.d_head)
        # heads that share keys have each their own s_qk
        return (q * s_qk, k * s_qk) if q.shape == k.shape else (q * s_qk.square(), k)


class NGPTForCausalLM(AnlitForCausalLM):
    config_class = NGPTConfig
    block_class = NGPTBlock


class Residual(nn.Module):
    """h, suggestion → w_h ∘ h + suggestion, or + w_s ∘ suggestion."""

    def __init__(self, d_model: int, weighs_suggestion: bool) -> None:
        super().__init__()
        self.h = nn.Parameter(torch.ones(d_model))
        self.suggestion = nn.Parameter(torch.ones(d_model)) if weighs_suggestion else None

    def forward(self, h: Tensor, suggestion: Tensor) -> Tensor:
        if self.suggestion is not None:
            suggestion = self.suggestion * suggestion
        return torch.addcmul(suggestion, self.h, h)


class AnGPTConfig(AnlitConfig):
    model_type = "anlit_angpt"


class AnGPTBlock(AnlitBlock):
    """anGPT (arXiv 2505.22014), folded: its constants, α and s_z are in the matrices.

        h ← w_A ∘ h + W_o · Attn(q, k, v)          q, k, v = W h;  q, k → rms → RoPE
        h ← w_M ∘ h + W_d (u ∘ SiLU(z))            u = W_u h, z = W_z h
        logits = W_head h

    With a post-norm the suggestions are unit vectors and are multiplied by w_s.
    """

    def __init__(self, config: AnGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
        self.alpha_A, self.alpha_M = Residual(d, config.post_norm), Residual(d, config.post_norm)
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        self.output = AttentionOutput(config, UnitNorm() if config.output_norm else nn.Identity())
        self.post_norm = UnitNorm() if config.post_norm else nn.Identity()

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = self.alpha_A(h, self.post_norm(self.attend(h, tokens, past)))
        return self.alpha_M(h, self.post_norm(self.mlp(h)))


class AnGPTForCausalLM(AnlitForCausalLM):
    config_class = AnGPTConfig
    block_class = AnGPTBlock

"""nGPT (arXiv 2410.01131) for transformers, folded: s_u, √d s_v and s_z are in the matrices.

q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head
h ← unit(h + α_A ∘ (unit(W_o · Attn(q, k, v)) − h))
h ← unit(h + α_M ∘ (unit(W_d (u ∘ SiLU(z))) − h))      u = W_u h, z = W_z h
logits = W_head h
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .anlit_attention import AttentionOutput, RMSNorm, TokenPositions, UnitNorm, attend, rotate, unit
from .anlit_model import AnlitConfig, AnlitForCausalLM, attention_maps, split_heads, with_past


class Stored(nn.Module):
    """A vector, (width,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(width))

    def forward(self) -> Tensor:
        return self.vector


class NGPTConfig(AnlitConfig):
    model_type = "anlit_ngpt"


class NGPTBlock(nn.Module):
    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.d_head = layer, config.head_dim
        self.mechanism, self.rotation = config.mechanisms[layer], config.rotations[config.positions[layer]]
        d, f = config.hidden_size, config.intermediate_size
        self.W_q, self.W_k, self.W_v, self.W_o = attention_maps(config)
        self.W_u, self.W_z, self.W_d = (nn.Linear(*shape, bias=False) for shape in ((d, f), (d, f), (f, d)))
        self.alpha_A, self.alpha_M, self.s_qk = Stored(d), Stored(d), Stored(self.W_q.out_features)
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm:
            eps = config.qk_norm["eps"]
            self.norm_qk = RMSNorm(self.d_head, eps, has_gain=False) if eps else UnitNorm()
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        norm = UnitNorm() if config.output_norm else nn.Identity()
        self.output = AttentionOutput(config, norm)

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = unit(torch.lerp(h, unit(self.attend(h, tokens, past)), self.alpha_A()))
        return unit(torch.lerp(h, unit(self.W_d(self.W_u(h) * silu(self.W_z(h)))), self.alpha_M()))

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = (split_heads(W(h), self.d_head) for W in (self.W_q, self.W_k, self.W_v))
        s_qk = self.s_qk().view(-1, 1, self.d_head)
        q, k = (self.norm_qk(rotate(y, self.rotation, tokens.queries)) for y in (q, k))
        if q.shape == k.shape:
            q, k = q * s_qk, k * s_qk
        else:  # heads that share keys have each their own s_qk
            q = q * s_qk.square()
        k, v = with_past(past, self.layer, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))


class NGPTForCausalLM(AnlitForCausalLM):
    config_class = NGPTConfig

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.post_init()

    def make_block(self, config: Any, layer: int) -> nn.Module:
        return NGPTBlock(config, layer)

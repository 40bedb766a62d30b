"""nGPT (arXiv 2410.01131) for transformers, folded: s_u, √d s_v and s_z are in the matrices.

q = unit(RoPE(W_q h)) ∘ s_qk, k likewise, per head
h ← unit(h + α_A ∘ (unit(W_o · Attn(q, k, v)) − h))
h ← unit(h + α_M ∘ (unit(W_d (u ∘ SiLU(z))) − h))      u = W_u h, z = W_z h
logits = W_head h
"""

from typing import Any

import torch
from torch import Tensor, nn

from .anlit_attention import AttentionOutput, RMSNorm, TokenPositions, UnitNorm, attend, rotate, unit
from .anlit_model import AnlitBlock, AnlitConfig, AnlitForCausalLM


class Stored(nn.Module):
    """A vector, (width,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(width))

    def forward(self) -> Tensor:
        return self.vector


class NGPTConfig(AnlitConfig):
    model_type = "anlit_ngpt"


class NGPTBlock(AnlitBlock):
    def __init__(self, config: NGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
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
        return unit(torch.lerp(h, unit(self.mlp(h)), self.alpha_M()))

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = self.heads(h)
        s_qk = self.s_qk().view(-1, 1, self.d_head)
        q, k = (self.norm_qk(rotate(y, self.rotation, tokens.queries)) for y in (q, k))
        if q.shape == k.shape:
            q, k = q * s_qk, k * s_qk
        else:  # heads that share keys have each their own s_qk
            q = q * s_qk.square()
        k, v = self.with_past(past, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))


class NGPTForCausalLM(AnlitForCausalLM):
    config_class = NGPTConfig
    block_class = NGPTBlock

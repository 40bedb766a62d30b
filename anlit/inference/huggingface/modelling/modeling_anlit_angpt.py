"""anGPT (arXiv 2505.22014) for transformers, folded: its constants, α and s_z are in the matrices.

    h ← w_A ∘ h + W_o · Attn(q, k, v)          q, k, v = W h;  q, k → rms → RoPE
    h ← w_M ∘ h + W_d (u ∘ SiLU(z))            u = W_u h, z = W_z h
    logits = W_head h

With a post-norm the suggestions are unit vectors and are multiplied by w_s.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .anlit_attention import AttentionOutput, RMSNorm, TokenPositions, UnitNorm, attend, rotate
from .anlit_model import AnlitBlock, AnlitConfig, AnlitForCausalLM


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
    def __init__(self, config: AnGPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d = config.hidden_size
        self.alpha_A, self.alpha_M = Residual(d, config.post_norm), Residual(d, config.post_norm)
        qk_norm = config.qk_norm
        self.norm_q, self.norm_k = (
            RMSNorm(self.d_head, qk_norm["eps"], qk_norm["gain"]) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        norm = UnitNorm() if config.output_norm else nn.Identity()
        self.output = AttentionOutput(config, norm)
        self.post_norm = UnitNorm() if config.post_norm else nn.Identity()

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = self.alpha_A(h, self.post_norm(self.attend(h, tokens, past)))
        return self.alpha_M(h, self.post_norm(self.mlp(h)))

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = self.heads(h)
        q, k = (rotate(y, self.rotation, tokens.queries) for y in (self.norm_q(q), self.norm_k(k)))
        k, v = self.with_past(past, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))


class AnGPTForCausalLM(AnlitForCausalLM):
    config_class = AnGPTConfig
    block_class = AnGPTBlock

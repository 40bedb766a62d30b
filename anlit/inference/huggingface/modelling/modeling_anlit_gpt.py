"""GPT+ for transformers, with settings that none of its architectures has.

h ← h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁;  q, k → rms·gain → RoPE
h ← h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
logits = W_head (rms(h)·g_f)
"""

from typing import Any

from torch import Tensor, nn

from .anlit_attention import AttentionOutput, RMSNorm, TokenPositions, attend, rotate
from .anlit_model import AnlitBlock, AnlitConfig, AnlitForCausalLM


class GPTConfig(AnlitConfig):
    model_type = "anlit_gpt"


class GPTBlock(AnlitBlock):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__(config, layer)
        d, eps = config.hidden_size, config.norm_eps
        self.norm_1, self.norm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        qk_norm = config.qk_norm
        self.norm_q, self.norm_k = (
            RMSNorm(self.d_head, qk_norm["eps"], qk_norm["gain"]) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.norm_v = RMSNorm(self.d_head, eps) if config.v_norm else nn.Identity()
        norm = RMSNorm(self.d_head, eps) if config.output_norm else nn.Identity()
        self.output = AttentionOutput(config, norm)
        self.post_norm_A, self.post_norm_M = (RMSNorm(d, eps) if config.post_norm else nn.Identity() for _ in range(2))

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = h + self.post_norm_A(self.attend(self.norm_1(h), tokens, past))
        return h + self.post_norm_M(self.mlp(self.norm_2(h)))

    def attend(self, x: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = self.heads(x)
        q, k = (rotate(y, self.rotation, tokens.queries) for y in (self.norm_q(q), self.norm_k(k)))
        k, v = self.with_past(past, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), x))


class GPTForCausalLM(AnlitForCausalLM):
    config_class = GPTConfig
    block_class = GPTBlock

    def final_norm(self, config: AnlitConfig) -> nn.Module:
        return RMSNorm(config.hidden_size, config.norm_eps)

"""GPT+ for transformers, with settings that none of its architectures has.

h ← h + W_o · Attn(q, k, v)        q, k, v = W_q x, W_k x, W_v x with x = rms(h)·g₁;  q, k → rms·gain → RoPE
h ← h + W_d (u ∘ SiLU(z))          u = W_u x, z = W_z x with x = rms(h)·g₂
logits = W_head (rms(h)·g_f)
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu

from .anlit_attention import AttentionOutput, RMSNorm, TokenPositions, attend, rotate
from .anlit_model import AnlitConfig, AnlitForCausalLM, attention_maps, split_heads, with_past


class GPTConfig(AnlitConfig):
    model_type = "anlit_gpt"


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.d_head = layer, config.head_dim
        self.mechanism, self.rotation = config.mechanisms[layer], config.rotations[config.positions[layer]]
        d, f, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.norm_1, self.norm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        self.W_q, self.W_k, self.W_v, self.W_o = attention_maps(config)
        self.W_u, self.W_z, self.W_d = (nn.Linear(*shape, bias=False) for shape in ((d, f), (d, f), (f, d)))
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
        x = self.norm_2(h)
        return h + self.post_norm_M(self.W_d(self.W_u(x) * silu(self.W_z(x))))

    def attend(self, x: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = (split_heads(W(x), self.d_head) for W in (self.W_q, self.W_k, self.W_v))
        q, k = (rotate(y, self.rotation, tokens.queries) for y in (self.norm_q(q), self.norm_k(k)))
        k, v = with_past(past, self.layer, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), x))


class GPTForCausalLM(AnlitForCausalLM):
    config_class = GPTConfig

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def make_block(self, config: Any, layer: int) -> nn.Module:
        return GPTBlock(config, layer)

    def final(self, h: Tensor) -> Tensor:
        return self.norm_f(h)

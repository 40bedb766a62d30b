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
from .anlit_model import AnlitConfig, AnlitForCausalLM, split_heads, with_past


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
        self.layer, self.n_heads = layer, config.num_attention_heads
        self.mechanism, self.positions = config.mechanisms[layer], config.positions[layer]
        d, f = config.hidden_size, config.intermediate_size
        d_head = d // self.n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.W_u, self.W_z, self.W_d = (nn.Linear(*shape, bias=False) for shape in ((d, f), (d, f), (f, d)))
        self.alpha_A, self.alpha_M, self.s_qk = Stored(d), Stored(d), Stored(d)
        self.norm_qk: nn.Module = nn.Identity()
        if config.qk_norm:
            eps = config.qk_norm["eps"]
            self.norm_qk = RMSNorm(d_head, eps, has_gain=False) if eps else UnitNorm()
        self.norm_v = UnitNorm() if config.v_norm else nn.Identity()
        norm = UnitNorm() if config.output_norm else nn.Identity()
        self.output = AttentionOutput(d, self.n_heads, config.gate, norm)

    def forward(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        h = unit(torch.lerp(h, unit(self.attend(h, tokens, past)), self.alpha_A()))
        return unit(torch.lerp(h, unit(self.W_d(self.W_u(h) * silu(self.W_z(h)))), self.alpha_M()))

    def attend(self, h: Tensor, tokens: TokenPositions, past: Any) -> Tensor:
        q, k, v = (split_heads(W(h), self.n_heads) for W in (self.W_q, self.W_k, self.W_v))
        s_qk = self.s_qk().view(self.n_heads, 1, -1)
        q, k = (self.norm_qk(rotate(y, self.positions, tokens.queries)) * s_qk for y in (q, k))
        k, v = with_past(past, self.layer, k, self.norm_v(v))
        return self.W_o(self.output(attend(q, k, v, self.mechanism, tokens), h))


class NGPTForCausalLM(AnlitForCausalLM):
    config_class = NGPTConfig

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__(config)
        self.post_init()

    def make_block(self, config: Any, layer: int) -> nn.Module:
        return NGPTBlock(config, layer)

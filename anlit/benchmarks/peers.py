"""The same training step with the models of other libraries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anlit.benchmarks.options import Size, blocks_of

COMPILED = ("no", "whole")


class Network(NamedTuple):
    """A peer's model, and its function from tokens (B, T) to logits (B, T, V)."""

    model: nn.Module
    logits: Callable[[Tensor], Tensor]


def litgpt(size: Size) -> Network:
    """litgpt's GPT as a Llama: RMSNorm, RoPE on the whole head, SwiGLU, untied head, no biases."""
    from litgpt import GPT, Config

    config = Config(
        name="llama", block_size=size.length, n_layer=size.n_layers, n_embd=size.d_model, n_head=size.n_heads,
        vocab_size=size.vocab_size, padded_vocab_size=size.vocab_size, intermediate_size=4 * size.d_model,
        mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm", bias=False, lm_head_bias=False, parallel_residual=False,
        rotary_percentage=1.0,
    )  # fmt: skip
    model = GPT(config)
    model.apply(model._init_weights)
    return Network(model, model)


def transformers(size: Size) -> Network:
    """Qwen3 of transformers with ungrouped heads and attention by scaled_dot_product_attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make: Any = Qwen3Config
    config = make(
        vocab_size=size.vocab_size, hidden_size=size.d_model, intermediate_size=4 * size.d_model,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, num_key_value_heads=size.n_heads,
        head_dim=size.d_model // size.n_heads, max_position_embeddings=size.length, tie_word_embeddings=False,
        attention_bias=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    return Network(model, lambda tokens: model(input_ids=tokens).logits)


PEERS: dict[str, Callable[[Size], Network]] = {"litgpt": litgpt, "transformers": transformers}
"""By the name of their package."""


class PeerStep:
    """A peer's training step: AdamW (fused), gradients clipped to 1.0, bfloat16 by autocast.

    Args:
        peer: A key of `PEERS`.
        size: The shapes of the model and the batch.
        compiled: `whole` compiles the network with the loss, `no` nothing.
    """

    def __init__(self, peer: str, size: Size, device: torch.device, compiled: str) -> None:
        torch.manual_seed(0)
        network = PEERS[peer](size)
        self.model = network.model.to(device).train()
        blocks = torch.from_numpy(blocks_of(size, documents=False)[0]).to(device)
        self.tokens, self.targets = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            return cross_entropy(network.logits(tokens).flatten(0, 1).float(), targets.flatten())

        self.loss = torch.compile(loss_of, dynamic=False) if compiled == "whole" else loss_of
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1, fused=True
        )
        self._size, self._device = size, device

    def train(self) -> Tensor:
        """Forward, backward, clipping, optimizer; returns the loss."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._size.dtype == "bfloat16"):
            loss = self.loss(self.tokens, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def flops_per_token(self) -> float:
        """Counted as in `anlit.models.flops`: 6 per weight of a linear map, 12·d per layer and visible key."""
        linear = sum(module.weight.numel() for module in self.model.modules() if isinstance(module, nn.Linear))
        keys = (self._size.length + 1) / 2
        return 6.0 * linear + 12.0 * self._size.d_model * keys * self._size.n_layers

"""The same training step with the models of other libraries: AdamW (fused), clipping to 1.0, bfloat16 by autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anlit.benchmarks.options import Size
from anlit.benchmarks.our_step import Step, batch_of

COMPILED = ("no", "whole")
Network = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A peer's model, and its function from tokens (B, T) to logits (B, T, V)."""


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
    return model, model


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
    return model, lambda tokens: model(input_ids=tokens).logits


PEERS: dict[str, Callable[[Size], Network]] = {"litgpt": litgpt, "transformers": transformers}
"""By the name of their package."""


def peer_step(peer: str, size: Size, device: torch.device, compiled: str) -> Step:
    """A peer's training step; `compiled`: `whole` compiles the network with the loss, `no` nothing."""
    torch.manual_seed(0)
    model, logits = PEERS[peer](size)
    model.to(device).train()
    batch = batch_of(size, False, device)
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas, eps=1e-9, weight_decay=0.1, fused=True)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits(tokens).flatten(0, 1).float(), targets.flatten())

    compute = torch.compile(loss_of, dynamic=False) if compiled == "whole" else loss_of

    def train() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=size.dtype == "bfloat16"):
            loss = compute(batch.tokens, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    # as in anlit.models.flops: 6 per weight of a linear map, 12·d per layer and visible key
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    flops = 6.0 * linear + 12.0 * size.d_model * (size.length + 1) / 2 * size.n_layers
    return Step(model, optimizer, train, flops)

"""The same training step with the models of other libraries, and the timing of a step.

It runs with the Python of an environment that has these libraries. `build` makes the step; `loss`, `seconds` and `peak`
measure it, see `TimedStep`.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .clock import peak_bytes, seconds_of
from .serve import serve

COMPILED = ("no", "blocks", "whole")


class Network(NamedTuple):
    """A peer's model, its function from tokens (B, T) to logits (B, T, V), and its blocks."""

    model: nn.Module
    logits: Callable[[Tensor], Tensor]
    blocks: Iterable[nn.Module]


def litgpt(size: dict[str, Any]) -> Network:
    """litgpt's GPT as a Llama: RMSNorm, RoPE on the whole head, SwiGLU, untied head, no biases."""
    from litgpt import GPT, Config

    config = Config(
        name="llama", block_size=size["length"], n_layer=size["n_layers"], n_embd=size["d_model"],
        n_head=size["n_heads"], vocab_size=size["vocab_size"], padded_vocab_size=size["vocab_size"],
        intermediate_size=4 * size["d_model"], mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm", bias=False,
        lm_head_bias=False, parallel_residual=False, rotary_percentage=1.0,
    )  # fmt: skip
    model = GPT(config)
    model.apply(model._init_weights)
    return Network(model, model, model.transformer.h)


def transformers(size: dict[str, Any]) -> Network:
    """Qwen3 of transformers with ungrouped heads and attention by scaled_dot_product_attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make: Any = Qwen3Config
    config = make(
        vocab_size=size["vocab_size"], hidden_size=size["d_model"], intermediate_size=4 * size["d_model"],
        num_hidden_layers=size["n_layers"], num_attention_heads=size["n_heads"], num_key_value_heads=size["n_heads"],
        head_dim=size["d_model"] // size["n_heads"], max_position_embeddings=size["length"], tie_word_embeddings=False,
        attention_bias=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    return Network(model, lambda tokens: model(input_ids=tokens).logits, model.model.layers)


PEERS: dict[str, Callable[[dict[str, Any]], Network]] = {"litgpt": litgpt, "transformers": transformers}


class PeerStep:
    """A peer's training step: AdamW (fused), gradients clipped to 1.0, bfloat16 by autocast.

    Args:
        peer: A key of `PEERS`.
        size: The numbers of `Size`, with the name of the dtype.
        device: The device.
        compiled: `whole` compiles the network with the loss, `blocks` each block, `no` nothing.
    """

    def __init__(self, peer: str, size: dict[str, Any], device: torch.device, compiled: str) -> None:
        torch.manual_seed(0)
        network = PEERS[peer](size)
        self.model = network.model.to(device).train()
        self.tokens, self.targets = (torch.from_numpy(part).to(device) for part in inputs_and_targets(size))
        self._logits = network.logits
        self.loss: Callable[[Tensor, Tensor], Tensor] = self._loss
        if compiled == "blocks":
            for block in network.blocks:
                block.compile(dynamic=False)
        elif compiled == "whole":
            self.loss = torch.compile(self._loss, dynamic=False)
        settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-9, "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **settings)
        self._size, self._device = size, device

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self._logits(tokens).flatten(0, 1).float(), targets.flatten())

    def _precision(self) -> Any:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._size["dtype"] == "bfloat16")

    def train(self) -> Tensor:
        """Forward, backward, clipping, optimizer; returns the loss."""
        with self._precision():
            loss = self.loss(self.tokens, self.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def flops_per_token(self) -> float:
        """Counted as in `anlit.models.flops`: 6 per weight of a linear map, 12·d per layer and visible key."""
        linear = sum(module.weight.numel() for module in self.model.modules() if isinstance(module, nn.Linear))
        keys = (self._size["length"] + 1) / 2
        return 6.0 * linear + 12.0 * self._size["d_model"] * keys * self._size["n_layers"]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that stay between steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from (self.tokens, self.targets)


def random_blocks(batch: int, length: int, vocab_size: int) -> np.ndarray:
    """Random tokens (B, T + 1) below V − 1, the same in every program."""
    return np.random.default_rng(0).integers(0, vocab_size - 1, (batch, length + 1))


def inputs_and_targets(size: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    blocks = random_blocks(size["batch"], size["length"], size["vocab_size"])
    return blocks[:, :-1].copy(), blocks[:, 1:].copy()


class TimedStep:
    """Measures a training step.

    Args:
        step: Has `train`, `tensors`, `parameters` and `flops_per_token`.
        device: The device.
    """

    def __init__(self, step: Any, device: torch.device) -> None:
        self.step, self.device = step, device
        self.facts: dict[str, Any] = {
            "parameters": step.parameters(),
            "flops_per_token": step.flops_per_token(),
        }

    def loss(self) -> float:
        """Take a step; returns its loss."""
        return float(self.step.train())

    def seconds(self, repeats: int = 1) -> float:
        """The time of a step, the mean of `repeats`."""
        return seconds_of(self.step.train, self.device, repeats)

    def peak(self) -> int | None:
        """The peak memory of a training step in bytes, including what stays between steps."""
        return peak_bytes(self.step.train, self.step.tensors(), self.device)

    def close(self) -> None:
        """Free its memory."""
        del self.step


class Peer:
    """A peer's step in a separate process, which shares the GPU's memory with ours."""

    def build(self, peer: str, size: dict[str, Any], device: str, compiled: str, threads: int) -> dict[str, Any]:
        """Make the step; returns its facts and the versions of its packages."""
        torch.set_num_threads(threads)
        self.timed = TimedStep(PeerStep(peer, size, torch.device(device), compiled), torch.device(device))
        return {**self.timed.facts, "versions": {package: version(package) for package in (peer, "torch")}}

    def loss(self) -> float:
        return self.timed.loss()

    def seconds(self, repeats: int) -> float:
        if self.timed.device.type != "cuda":
            return self.timed.seconds(repeats)
        self.timed.step.train()  # fills the allocator's cache, which the last turn has emptied
        found = self.timed.seconds(repeats)
        torch.cuda.empty_cache()
        return found

    def peak(self) -> int | None:
        return self.timed.peak()


if __name__ == "__main__":
    peer = Peer()
    serve({"build": peer.build, "loss": peer.loss, "seconds": peer.seconds, "peak": peer.peak})

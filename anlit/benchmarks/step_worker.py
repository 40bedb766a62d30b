"""What others offer for the same training step, and how a step is timed; also a program of its own.

Run with the Python of an environment that has the package, so nothing of anlit is imported:

    python step_worker.py '{"peer": "litgpt", "compiled": "whole", "size": {…}, "device": "cpu", "threads": 2}'

It answers each line of JSON on standard input by one on standard output, see `Timed.answer`; the first line of output
tells what was built, or why nothing.
"""

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

COMPILED = ("no", "blocks", "whole")


class Network(NamedTuple):
    """A peer's model, what makes logits (B, T, V) of tokens (B, T), and the modules that are its blocks."""

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
    """Qwen3 of transformers, as many heads of keys as of queries, attention by scaled_dot_product_attention."""
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
        size: Numbers of `Size`, dtype as its name.
        device: Where.
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

    @torch.no_grad()
    def forward(self) -> Tensor:
        """The loss, in training mode, without gradients."""
        with self._precision():
            return self.loss(self.tokens, self.targets)

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def flops_per_token(self) -> float:
        """As `anlit.models.flops` counts: six for each weight of a linear map, 12·d a layer for each visible key."""
        linear = sum(module.weight.numel() for module in self.model.modules() if isinstance(module, nn.Linear))
        keys = (self._size["length"] + 1) / 2
        return 6.0 * linear + 12.0 * self._size["d_model"] * keys * self._size["n_layers"]

    def tensors(self) -> Iterator[Tensor]:
        """What stays between steps."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from (self.tokens, self.targets)


def random_blocks(batch: int, length: int, vocab_size: int) -> np.ndarray:
    """Tokens (B, T + 1) below V − 1, the same in every program."""
    return np.random.default_rng(0).integers(0, vocab_size - 1, (batch, length + 1))


def inputs_and_targets(size: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    blocks = random_blocks(size["batch"], size["length"], size["vocab_size"])
    return blocks[:, :-1].copy(), blocks[:, 1:].copy()


class Timed:
    """Answers what is asked about a step.

    Args:
        step: Has `train`, `forward`, `tensors`, and perhaps `infer`.
        device: Where it computes.
    """

    def __init__(self, step: Any, device: torch.device) -> None:
        self.step, self.device = step, device

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """`do: loss` takes a step and tells its loss; `do: time` gives the seconds of a call of `kind`, the mean of
        `repeats`; `do: peak` the bytes that a call of `kind` holds at its peak, with what stays between steps."""
        if request["do"] == "loss":
            return {"loss": float(self.step.train())}
        call = getattr(self.step, request["kind"])
        if request["do"] == "peak":
            return {"bytes": peak_bytes(call, self.step.tensors(), self.device)}
        if self.device.type == "cuda":
            call()  # fills the allocator's cache, which the last turn may have emptied
        seconds = seconds_of(call, self.device, request["repeats"])
        if request.get("empty_cache") and self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"seconds": seconds}


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Mean time of a call, on the device's own clock where it has one."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000 / repeats


def peak_bytes(call: Callable[[], Any], kept: Iterable[Tensor], device: torch.device) -> int | None:
    """What a call holds at its peak: `kept`, and what it takes beside that.

    On a GPU the allocator counts; on Linux the kernel, by pages that the process has; elsewhere nobody does: None.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before + sum(storages.values())
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that the process kept would hide what the call takes
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = _status_bytes("VmRSS")
        call()
        return _status_bytes("VmHWM") - before + sum(storages.values())
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def described(step: Any) -> dict[str, Any]:
    return {"parameters": step.parameters(), "flops_per_token": step.flops_per_token()}


def main(argv: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to standard error instead
    os.dup2(2, 1)
    given = json.loads(argv[0])

    def say(what: dict[str, Any]) -> None:
        what = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in what.items()}
        print(json.dumps(what), file=answers, flush=True)

    try:
        torch.set_num_threads(given["threads"])
        device = torch.device(given["device"])
        step = PeerStep(given["peer"], given["size"], device, given["compiled"])
        packages = (given["peer"], "torch")
        say({**described(step), "versions": {package: version(package) for package in packages}})
        timed = Timed(step, device)
        for line in sys.stdin:
            say(timed.answer(json.loads(line)))
    except (RuntimeError, ImportError, ValueError, TypeError, AttributeError) as error:
        say({"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])

"""Training steps and whole runs on the imaginary device.

`python -m tests.accelerator.step` prints as JSON the error of each case of a training step, or
null, by its name, and what waits in whole runs. The settings are tried with the architectures in
turn.
"""

import contextlib
import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anlit import (
    ALiBi,
    DynamicNTK,
    LogN,
    MuonAdamW,
    NoPE,
    Plain,
    PositionsPattern,
    RoPE,
    ScaleInvariant,
    SlidingWindow,
)
from anlit.nn.models.runtime import Runtime
from anlit.training.optim.optimizers import parameter_groups
from tests.accelerator import fit
from tests.accelerator.device import NAME, on_device, register
from tests.nn.models.tiny import ARCHITECTURES, prepare_to_train, tiny

BATCH_SIZE = 4
VOCABULARY = 512

LENGTH = 1100
"""Some blocks of queries; the last is not full."""

COMPILED = Runtime(compile=True)
NORMS = {"v_norm": True, "attention_norm": True, "post_norm": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "Plain by eager": {"attention": Plain(), "kernel": "eager"},
    "Plain by sdpa": {"attention": Plain(), "kernel": "sdpa"},
    "Plain by flash": {"attention": Plain(), "kernel": "flash"},
    "Plain by triton": {"attention": Plain(), "kernel": "triton"},
    "ScaleInvariant by eager": {"attention": ScaleInvariant(), "kernel": "eager"},
    "ScaleInvariant by triton": {"attention": ScaleInvariant(), "kernel": "triton"},
    "ALiBi": {"attention": ALiBi()},
    "a window": {"attention": SlidingWindow(100)},
    "LogN": {"attention": LogN()},
    "DynamicNTK": {"positions": DynamicNTK()},
    "patterned positions": {"positions": PositionsPattern([RoPE(), NoPE()])},
    "gates and norms": {**NORMS, "attention_gate": "per_head"},
    "QK-clip": {"qk_norm": False, "qk_clip": 10.0},
    "Muon": {"optimizer": MuonAdamW},
    "dropout": {"dropout": 0.1, "kernel": "eager"},
    "recomputed": {"runtime": Runtime(recompute_every=1)},
    "compiled Plain by flash": {"attention": Plain(), "kernel": "flash", "runtime": COMPILED},
    "compiled Plain by sdpa": {"attention": Plain(), "kernel": "sdpa", "runtime": COMPILED},
    "compiled ScaleInvariant by triton": {
        "attention": ScaleInvariant(),
        "kernel": "triton",
        "runtime": COMPILED,
    },
    "compiled ScaleInvariant by flex": {
        "attention": ScaleInvariant(),
        "kernel": "flex",
        "runtime": COMPILED,
    },
    "compiled ScaleInvariant by eager": {
        "attention": ScaleInvariant(),
        "kernel": "eager",
        "runtime": COMPILED,
    },
}
"""Settings of the tiny model, with packed documents."""

N_UNPACKED = 8
"""The first settings, which are also tried with a document per row."""


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    architectures = cycle(ARCHITECTURES)
    for name, changes in SETTINGS.items():
        architecture = next(architectures)
        label = f"{architecture.__name__}, packed, {name}"
        yield label, partial(step, architecture, True, **changes)
    for name in list(SETTINGS)[:N_UNPACKED]:
        architecture = next(architectures)
        label = f"{architecture.__name__}, one document, {name}"
        yield label, partial(step, architecture, False, **SETTINGS[name])


class NoPairs(TorchDispatchMode):
    """Fails if an operation makes a tensor of all pairs of tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            n_long_axes = sum(size >= LENGTH for size in getattr(tensor, "shape", ()))
            assert n_long_axes < 2, f"{func} makes {tensor.shape}"
        return result


def step(architecture: Any, is_packed: bool, **changes: Any) -> None:
    """Take a step of training, from the forward pass to the norms, then a step of validation."""
    torch.compiler.reset()
    model = tiny(
        architecture, n_layers=1, vocab_size=VOCABULARY, document_masking=is_packed, **changes
    )
    decoder = model.model
    prepare_to_train(decoder, model.runtime, NAME)
    decoder.compiles_loss = False
    # The compiler does not take the mode. On this device sdpa's stand-in makes a mask.
    makes_pairs = changes.get("kernel") == "sdpa" and not is_packed
    if model.runtime.compile is True or makes_pairs:
        mode: Any = contextlib.nullcontext()
    else:
        mode = NoPairs()
    with FakeTensorMode(), mode:
        on_device(decoder)
        optimizer = model.make_optimizer(parameter_groups(decoder))
        tokens = torch.empty(BATCH_SIZE, LENGTH, dtype=torch.int64, device=NAME)
        targets = torch.empty_like(tokens)
        packing: tuple[Any, ...] = ()
        if is_packed:
            packing = (torch.empty_like(tokens), torch.empty(9, dtype=torch.int32), LENGTH // 2)
        loss, objective = decoder(tokens, *packing, targets=targets, z_loss=1e-4)
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decoder.clip_qk()
        decoder.restore_norms()
        with torch.no_grad():
            validated, _ = decoder(tokens, *packing, targets=targets)
    for result in (loss, norm, validated, *decoder.parameters()):
        assert result.device.type == NAME


def add_and_read(device: str) -> None:
    """Add tensors of the imaginary and another device, and read a number."""
    with FakeTensorMode():
        torch.ones(2, device=NAME).add(torch.ones(2, device=device))[0].item()


MISTAKES = {"waiting": partial(add_and_read, NAME), "mixing": partial(add_and_read, "cpu")}
"""Cases that must fail: reading a number, and adding tensors of two devices."""


def main() -> None:
    warnings.simplefilter("ignore")
    register()
    # Through the compiler's front end, without the kernels that it would make
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)  # type: ignore
    errors: dict[str, str | None] = {}
    for name, run in [*cases(), *MISTAKES.items()]:
        try:
            errors[name] = run()
        except Exception:
            errors[name] = traceback.format_exc(limit=-4)
    print(json.dumps([errors, fit.waits()]))


if __name__ == "__main__":
    main()

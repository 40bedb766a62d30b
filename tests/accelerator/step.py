"""`python -m tests.accelerator.step` prints, as JSON, what went wrong, or null, by the name of each case of a training
step, and what waits in whole runs. Each setting is tried with one architecture, in turns."""

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
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.nn.models.runtime import Runtime
from anlit.training.optim.optimizers import parameter_groups
from tests.accelerator import fit
from tests.accelerator.device import NAME, on_device, register
from tests.nn.models.tiny import ARCHITECTURES, tiny

BATCH, LENGTH, VOCAB = 4, 1100, 512  # some blocks of queries, the last of them not full
NORMS = dict.fromkeys(("v_norm", "attention_norm", "post_norm"), True)


def by(*pairs: tuple[Mechanism, str], prefix: str, **others: Any) -> dict[str, dict[str, Any]]:
    """Settings of each mechanism and kernel."""
    return {
        f"{prefix} {type(m).__name__} by {b}": {"attention": m, "kernel": b, **others}
        for m, b in pairs
    }


SETTINGS: dict[str, dict[str, Any]] = {
    **by(*[(Plain(), b) for b in ("eager", "sdpa", "flash", "triton")],
    *[(ScaleInvariant(), b) for b in ("eager", "triton")], prefix="eagerly"), "ALiBi": {"attention": ALiBi()},
    "a window": {"attention": SlidingWindow(100)}, "LogN": {"attention": LogN()},
    "DynamicNTK": {"positions": DynamicNTK()}, "patterned positions": {"positions": PositionsPattern([RoPE(), NoPE()])},
    "gates and norms": {**NORMS, "attention_gate": "per_head"}, "QK-clip": {"qk_norm": False, "qk_clip": 10.0},
    "Muon": {"optimizer": MuonAdamW}, "dropout": {"dropout": 0.1, "kernel": "eager"},
    "recomputed": {"runtime": Runtime(recompute_every=1)},
    **by(*[(Plain(), b) for b in ("flash", "sdpa")], *[(ScaleInvariant(), b) for b in ("triton", "flex", "eager")],
    prefix="compiled", runtime=Runtime(compile=True)),
}  # fmt: skip
DENSE_TOO = 8  # of the settings are tried with one document a row as well as packed


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    tried = [(name, True) for name in SETTINGS] + [
        (name, False) for name in [*SETTINGS][:DENSE_TOO]
    ]
    for (name, packed), architecture in zip(tried, cycle(ARCHITECTURES)):
        label = f"{architecture.__name__}, {'packed' if packed else 'one document'}, {name}"
        yield label, partial(step, architecture, packed, **SETTINGS[name])


class NoPairs(TorchDispatchMode):
    """Fails where an operation makes a tensor of all pairs of tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            assert sum(size >= LENGTH for size in getattr(tensor, "shape", ())) < 2, (
                f"{func} makes {tensor.shape}"
            )
        return result


def step(architecture: Any, documents: bool, **changes: Any) -> None:
    """Forward, backward, clipping, the optimizer and what follows it; then what validation computes."""
    torch.compiler.reset()
    model = tiny(architecture, n_layers=1, vocab_size=VOCAB, document_masking=documents, **changes)
    decoder = model.model
    model.runtime.apply(decoder, NAME)
    decoder.compiles_loss = False
    # The compiler takes no such mode, and what stands in for the kernel that PyTorch's attention ends in makes a mask.
    is_left_out = model.runtime.compile is True or (
        not documents and changes.get("kernel") == "sdpa"
    )
    with FakeTensorMode(), contextlib.nullcontext() if is_left_out else NoPairs():
        on_device(decoder)
        optimizer = model.make_optimizer(parameter_groups(decoder))
        tokens, targets, ids = (
            torch.empty(BATCH, LENGTH, dtype=torch.int64, device=NAME) for _ in range(3)
        )
        packing = (ids, torch.empty(9, dtype=torch.int32), LENGTH // 2) if documents else ()
        loss, objective = decoder(tokens, *packing, targets=targets, z_loss=1e-4)
        objective.backward()
        norm = torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        decoder.clip_qk()
        decoder.restore_norms()
        with torch.no_grad():
            validated, _ = decoder(tokens, *packing, targets=targets)
    assert {result.device.type for result in (loss, norm, validated, *decoder.parameters())} == {
        NAME
    }


def look(end: str) -> None:
    """Reads a number, or adds tensors of two devices, which are to be seen."""
    with FakeTensorMode():
        torch.ones(2, device=NAME).add(torch.ones(2, device=end))[0].item()


TO_BE_SEEN = {"waiting": partial(look, NAME), "mixing": partial(look, "cpu")}


def main() -> None:
    warnings.simplefilter("ignore")
    register()
    compile_ = (
        torch.compile
    )  # through the compiler's front end, without the kernels that it would make
    torch.compile = partial(compile_, backend="aot_eager", fullgraph=True)  # type: ignore
    errors: dict[str, str | None] = {}
    for name, run in [*cases(), *TO_BE_SEEN.items()]:
        try:
            errors[name] = run()
        except Exception:
            errors[name] = traceback.format_exc(limit=-4)
    print(json.dumps([errors, fit.waits()]))


if __name__ == "__main__":
    main()

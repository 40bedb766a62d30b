"""Training steps on a device that is not the CPU and does not exist: `python -m tests.models.accelerator` prints a JSON
object, from the name of each case to what went wrong in it, or null.

The device is registered from Python and its tensors are fake: they have a shape, a type and a device, and no numbers.
So an operation on tensors of two devices fails as it would on a GPU, and so does whatever has to know a number:
`.item()`, `nonzero`, a condition, each of which waits for a GPU. A process of its own, for a device cannot be removed.
"""

import json
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

from anlit import ALiBi, DynamicNTK, LogN, MuonAdamW, NoPE, Plain, PositionsPattern, RoPE, ScaleInvariant, SlidingWindow
from anlit.attention.around import AroundAttention
from anlit.attention.backends import BACKENDS
from anlit.training.execution import Execution
from anlit.training.optimizers import parameter_groups
from tests.models.tiny import ARCHITECTURES, tiny

DEVICE = "imaginary"
BATCH, LENGTH, VOCAB = 4, 64, 512


class DeviceModule(backend_registration._DummyBackendModule):
    """What torch asks of a kind of device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Make the device known, and let the kernels that are written for CUDA have it: of them only the shapes run."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=DeviceModule())
    for name in ("flash", "triton"):
        of_any_device = BACKENDS[name].reason_against
        BACKENDS[name].reason_against = _without_queries(of_any_device)  # type: ignore[attr-defined]


def _without_queries(reason_against: Callable[..., str | None]) -> Callable[..., str | None]:
    return lambda mechanism, q=None, dropout=0.0: reason_against(mechanism, None, dropout)


def cases() -> Iterator[tuple[str, Callable[[FakeTensorMode], None]]]:
    for architecture in ARCHITECTURES:
        for documents in (False, True):
            packed = "packed" if documents else "one document"
            for mechanism, backends in (
                (Plain(), ("eager", "sdpa", "flash", "triton")),
                (ScaleInvariant(), ("eager", "triton")),
            ):
                for backend in backends:
                    name = f"{architecture.__name__}, {packed}, {type(mechanism).__name__} by {backend}"
                    yield name, partial(step, architecture, documents, attention=mechanism, backend=backend)
        around = AroundAttention(v_norm=True, output_norm=True, gate="per_head", post_norm=True)
        compiled = Execution(compile=True)
        settings: dict[str, dict[str, Any]] = {
            "LogN": {"attention": LogN()},
            "ALiBi": {"attention": ALiBi()},
            "a window": {"attention": SlidingWindow(16)},
            "DynamicNTK": {"positions": DynamicNTK()},
            "patterned positions": {"positions": PositionsPattern([RoPE(), NoPE()])},
            "gates and norms": {"around": around},
            "QK-clip": {"qk_norm": False, "around": AroundAttention(qk_clip=10.0)},
            "Muon": {"optimizer": MuonAdamW},
            "dropout": {"dropout": 0.1, "backend": "eager"},
            "recomputed": {"execution": Execution(recompute_every=1)},
            "compiled over Triton": {"execution": compiled, "attention": ScaleInvariant(), "backend": "triton"},
        }  # fmt: skip
        for name, changes in settings.items():
            yield f"{architecture.__name__}, packed, {name}", partial(step, architecture, True, **changes)


def step(architecture: Any, documents: bool, mode: FakeTensorMode, **changes: Any) -> None:
    """Forward, backward, clipping, the optimizer and what follows it; then what validation computes."""
    torch.compiler.reset()
    model = tiny(architecture, n_layers=1, vocab_size=VOCAB, document_masking=documents, **changes)
    decoder = model.model
    model.execution.apply(decoder, DEVICE)
    decoder.compiles_loss = False
    with mode:
        decoder._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=DEVICE))
        optimizer = model.make_optimizer(parameter_groups(decoder))
        tokens, targets, ids = (torch.empty(BATCH, LENGTH, dtype=torch.int64, device=DEVICE) for _ in range(3))
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
    results = [loss, norm, validated, *decoder.parameters()]
    assert {result.device.type for result in results} == {DEVICE}


def waiting(mode: FakeTensorMode) -> None:
    """Looks at a number."""
    with mode:
        torch.ones(1, device=DEVICE).item()


def mixing(mode: FakeTensorMode) -> None:
    """Adds tensors of two devices."""
    with mode:
        torch.ones(2, device=DEVICE) + torch.ones(2)


def main() -> None:
    warnings.simplefilter("ignore")
    register()
    compile_ = torch.compile  # through the compiler's front end, without the kernels that it would make
    torch.compile = lambda function, dynamic: compile_(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)  # type: ignore
    found: dict[str, str | None] = {}
    mode = FakeTensorMode()
    for name, run in [*cases(), ("waiting", waiting), ("mixing", mixing)]:
        try:
            run(mode=mode)
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""`auto` compiles where it helps, and compiled training keeps the constraint."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from anlit.nn.models import runtime
from anlit.nn.models.runtime import Runtime
from tests.nn.models.tiny import ARCHITECTURES, architectures, prepare_to_train, random_tokens, tiny


def test_auto_compiles_where_triton_makes_kernels(monkeypatch) -> None:
    for has_triton in (True, False):
        monkeypatch.setattr(runtime.triton, "IS_INSTALLED", has_triton)
        assert Runtime().compiles_on("cuda") == has_triton
        assert not Runtime().compiles_on("cpu")
        assert Runtime(compile=True).compiles_on("cpu")
        assert not Runtime(compile=False).compiles_on("cuda")


@architectures
def test_what_runs_compiled_on_a_gpu_gives_the_same(architecture, monkeypatch) -> None:
    """Blocks, loss and restored norms through the compiler's front end, without its kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain = tiny(architecture, n_layers=1).model
    compiled = tiny(architecture, n_layers=1).model
    compiled.load_state_dict(plain.state_dict())
    prepare_to_train(compiled, Runtime(compile=True), "cuda")
    assert compiled.compiles_loss
    compiled.compiles_loss = False  # its compilation is tested where it is
    tokens = random_tokens(2, 16)
    targets = random_tokens(2, 16, seed=1)

    for model in (plain, compiled):
        _, objective = model(tokens, targets=targets)
        objective.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
        model.restore_norms()

    assert plain.state_dict().keys() == compiled.state_dict().keys()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(
            weight, compiled.get_parameter(name), rtol=1e-5, atol=1e-6, msg=name
        )
    for norms in compiled.row_norms():
        assert norms.max() <= 1 + 1e-6


def test_a_thread_that_recomputes_has_room_for_as_many_compilations(monkeypatch) -> None:
    """Like the backward pass on a GPU, in another thread, with torch's default limit of 8."""
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch.compiler.reset()  # what other tests have compiled counts towards the limit
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    model = tiny(ARCHITECTURES[0], n_layers=1, kernel="eager").model
    prepare_to_train(model, Runtime(compile=True), "cpu")
    lengths = range(2, 14)
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        for length in lengths:
            pool.submit(model, random_tokens(1, length)).result()
    assert len(compiled) == len(lengths)


NEW_PROCESS = """
import json, resource, torch
from anlit.nn.models.runtime import prepare_cpu

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(24):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
given_back = faults()
prepare_cpu()
kept = faults()
torch.set_num_threads(2)
x = torch.full((2**20,), 1e-30)
print(json.dumps([given_back, kept, int((x * 1e-10).count_nonzero())]))
"""


BFLOAT16 = """
import torch
from anlit.nn.models.runtime import prepare_cpu

prepare_cpu()
q = torch.randn(1, 2, 64, 32, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
"""


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_bfloat16_trains_where_the_user_hides_avx512_from_torch(capability) -> None:
    """Red on processors with AMX alone."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    environment.pop("ONEDNN_MAX_CPU_ISA", None)
    subprocess.check_call([sys.executable, "-c", BFLOAT16], env=environment)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for glibc only")
def test_freed_memory_is_kept_and_numbers_too_small_to_be_normal_are_0_in_all_threads() -> None:
    """Blocks of 64 MB, freed and taken again, mostly cost no page fault.

    Glibc before 2.38 uses a few in turn, up to six were seen.
    """
    n_given_back, n_kept, numbers = json.loads(
        subprocess.check_output([sys.executable, "-c", NEW_PROCESS])
    )
    assert n_kept < n_given_back / 2
    assert numbers == 0 or not torch.set_flush_denormal(False)

"""Compile FlexAttention's kernels without a GPU: `python -m tests.nn.attention.flex_memory`.

PyTorch traces attention on a CPU. The traced tensors are then renamed to CUDA, so that Inductor
writes the Triton kernels of a GPU, and Triton compiles these. Each row shows what a kernel takes.
"""

import argparse
import copy
import functools
import importlib.util
import itertools
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.debug
import torch._inductor.scheduler
import torch.utils._triton
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map

from anlit import ALiBi, Plain, ScaleInvariant, SlidingWindow
from anlit.nn.kernels import flex
from anlit.nn.kernels.documents import Documents
from anlit.nn.mechanisms.mechanism import Mechanism
from anlit.reporting.text import echo
from tests.nn.attention.kernels import Straight
from tests.nn.attention.registers import resources

N_ROWS = 2
N_HEADS = 2
LENGTH = 4096
FORMS: dict[str, tuple[Mechanism, bool]] = {
    "plain": (Plain(), False),
    "fixed": (ScaleInvariant(), False),
    "learned": (ScaleInvariant(learned="per_layer"), False),
    "documents": (ScaleInvariant(learned="per_layer"), True),
    "window": (SlidingWindow(1024, ScaleInvariant()), True),
    "slopes": (ALiBi(), True),
    "heads": (Straight(), True),
}
"""A mechanism, and whether documents are packed."""
KERNELS = ("forward", "backward")
N_PROCESSORS = {80: 108, 90: 132}
"""Multiprocessors of an A100 and of an H100, by compute capability."""


def trace(form: str, width: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, GraphModule]:
    """The graphs of the forward and the backward pass that the kernel's compilation gets."""
    template, is_packed = FORMS[form]
    mechanism = template.for_layer(N_HEADS, width, 0)
    graphs: dict[str, GraphModule] = {}
    backend = functools.partial(record_graphs, graphs)
    compiled = torch.compile(flex._run, backend=backend, dynamic=False)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        RECORDING,
        mock.patch.object(flex_attention, "_validate_device"),  # it refuses a backward pass on CPU
        mock.patch.object(flex, "_compiled", return_value=compiled),
    ):
        shape = (N_ROWS, N_HEADS, LENGTH, width)
        qkv = [torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        ids = torch.empty(N_ROWS, LENGTH, dtype=torch.long) if is_packed else None
        documents = Documents(ids, LENGTH, torch.device("cpu"))
        flex.attend(*qkv, mechanism, documents, 0.0)
    return graphs


def record_graphs(graphs: dict[str, GraphModule], graph: GraphModule, inputs: Any) -> Any:
    """Compile nothing. Add the graphs that a GPU's compiler gets: `forward` and `backward`."""

    def record(name: str, graph: GraphModule, inputs: Any) -> Any:
        graphs[name] = graph
        outputs = graph.graph.find_nodes(op="output")[0].args[0]
        return lambda *tensors: tree_map(lambda node: node.meta["val"], outputs)

    return aot_module_simplified(
        graph,
        inputs,
        fw_compiler=functools.partial(record, "forward"),
        bw_compiler=functools.partial(record, "backward"),
        decompositions=select_decomp_table(),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


RECORDING = torch._functorch.config.patch(
    force_non_lazy_backward_lowering=True, enable_autograd_cache=False
)
"""The settings in which `record_graphs` also gets the graph of the backward pass."""


def write_kernel(graph: GraphModule, capability: int) -> str:
    """The source of the FlexAttention kernel that Inductor writes for a graph traced on a CPU."""
    code = write_code(graph, capability)
    kernels = re.findall(r"async_compile\.triton\('triton_tem\w+', '{3}(.*?)'{3}", code.text, re.S)
    (source,) = kernels
    return source


class Code(NamedTuple):
    """The kernels that Inductor writes, and their calls."""

    text: str
    n_bytes: int
    """Bytes that the kernels read and write, as Inductor counts them: a kernel that needs a tensor
    in two places reads it once."""


def write_code(graph: GraphModule, capability: int) -> Code:
    """Inductor's code for a graph traced on a CPU."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with imagined_gpu(capability), mode:
        graph = copy.deepcopy(graph)
        rename_device(graph)
        inputs = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        lowering = GraphLowering(graph, example_inputs=inputs)
        debug = torch._inductor.debug.DebugContext()
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_debug_handler(debug),
        ):
            lowering.run(*inputs)
            text = lowering.codegen()[0].value
            n_bytes, _, _ = lowering.count_bytes()
            return Code(text, n_bytes)


def rename_device(graph: GraphModule) -> None:
    """Let all tensors of a graph be CUDA's, and let it store what a backward pass needs."""

    def renamed(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def with_sums(value: Any) -> Any:
        if isinstance(value, dict) and "OUTPUT_LOGSUMEXP" in value:
            return {**value, "OUTPUT_LOGSUMEXP": True}
        return value

    for module in graph.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            node.meta = {"val": tree_map(renamed, node.meta.get("val"))}
            node.args = tuple(map(with_sums, node.args))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        module.recompile()


@contextmanager
def imagined_gpu(capability: int) -> Iterator[None]:
    """Inside, PyTorch believes that it has a GPU of this compute capability."""
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name="imagined",
        major=major,
        minor=minor,
        multi_processor_count=N_PROCESSORS[capability],
        warp_size=32,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
    )
    answers = [
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "_get_device_properties", lambda device: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        (torch._inductor.scheduler, "has_triton", lambda: True),
        (torch.utils._triton, "triton_hash_with_backend", lambda: ""),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (FakeTensorMode, "avoid_device_init", True),
    ]
    DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        yield
    DeviceProperties.create.__func__.cache_clear()  # type: ignore[attr-defined]


def compile_kernel(source: str, capability: int) -> tuple[Any, dict[str, int]]:
    """A compiled kernel, and its warps and stages."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options: dict[str, Any] = {}

    def template(**values: Any) -> Any:
        options.update(values)
        return lambda function: function

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("kernel", path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        with mock.patch.object(triton_heuristics, "template", template):
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        types = options["triton_meta"]
        function = getattr(module, options["inductor_meta"]["kernel_name"])
        program = ASTSource(function, types["signature"], types["constants"], types["configs"][0])
        launch = {name: options[name] for name in ("num_warps", "num_stages")}
        compiled = triton.compile(program, GPUTarget("cuda", capability, 32), options=launch)
    return compiled, launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--form", nargs="+", default=["fixed", "documents"], choices=FORMS)
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    dtype = getattr(torch, options.precision)
    for form, width in itertools.product(options.form, options.width):
        graphs = trace(form, width, dtype)
        for capability, kernel in itertools.product(options.capability, KERNELS):
            source = write_kernel(graphs[kernel], capability)
            compiled, choices = compile_kernel(source, capability)
            taken = resources(compiled)
            shown = {name: taken[name] for name in ("shared", "registers", "stack")} | choices
            numbers = "  ".join(f"{name} {value}" for name, value in shown.items())
            echo(f"sm_{capability}  D {width:3d}  {form:9s}  {kernel}: {numbers}")


if __name__ == "__main__":
    main()

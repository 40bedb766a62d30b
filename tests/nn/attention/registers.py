"""Compile kernels without a GPU and show their resources: `python -m tests.nn.attention.registers`.

A kernel that spills needs smaller blocks or more warps (`blocks.py`).
"""

import argparse
import importlib
import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from anlit.nn.kernels.triton.blocks import blocks_for
from anlit.nn.kernels.triton.tables import TOLERANCES
from anlit.reporting.text import echo

N_HEADS = 12
KERNELS = ("forward", "backward_queries", "backward_keys")
FORMS = ("plain", "biases", "dense", "learned", "packed", "windowed")
"""No tables; biases; gains and biases. The last three add a learned bias, documents, or documents
and a window."""
PRECISIONS = {
    "bfloat16": (torch.bfloat16, "*bf16", "ieee"),
    "float16": (torch.float16, "*fp16", "ieee"),
    "float32": (torch.float32, "*fp32", "ieee"),
    "tf32": (torch.float32, "*fp32", "tf32"),
}
"""The dtype of q, k and v, Triton's name for a pointer to it, and the input precision of
products."""
TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), "*q"),
    "scale": "fp32",
    **dict.fromkeys(("tables", "lines", "tangents", "lse", "delta", "d_coefficient"), "*fp32"),
    **dict.fromkeys(("starts", "ends", "far_start"), "*i32"),
}


def compile_kernel(
    kernel: str,
    form: str,
    width: int,
    capability: int,
    group: int = 1,
    precision: str = "bfloat16",
) -> Any:
    """The compiled kernel: a name of `KERNELS`, of `FORMS` and of `PRECISIONS`.

    `capability` is 80 or 90.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module = importlib.import_module(f"anlit.nn.kernels.triton.{kernel}")
    function = getattr(module, kernel)
    padded = max(16, 1 << (width - 1).bit_length())
    dtype, pointer, products = PRECISIONS[precision]
    blocks_of_kernels = blocks_for(padded, dtype, divmod(capability, 10))
    blocks = getattr(blocks_of_kernels, kernel)
    constants: dict[str, Any] = {
        "n_heads": N_HEADS,
        "group": group,
        "width": width,
        "width_padded": padded,
        "block_m": blocks.block_m,
        "block_n": blocks.block_n,
        "precision": products,
        "pairs": form not in ("plain", "biases"),
        "tangent_pairs": False,
        **dict.fromkeys(unused_arguments(form, dtype)),
    }
    names = function.arg_names
    types = dict(TYPES)
    if group > 1:
        types["dk"] = "*fp32"  # each query head's part of the sum
        types["dv"] = "*fp32"
    types |= dict.fromkeys(constants, "constexpr")
    signature: dict[str, str] = {}
    aligned: Any = {}
    for number, name in enumerate(names):
        kind = types.get(name, "i32").replace("*q", pointer)
        signature[name] = kind
        if kind.startswith("*") or kind == "i32":
            aligned[number,] = [["tt.divisibility", 16]]
    constants = {name: constants[name] for name in names if name in constants}
    source = ASTSource(function, signature, constants, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def unused_arguments(form: str, dtype: torch.dtype) -> list[str]:
    """The arguments that are None in a form."""
    unused = []
    if form == "plain":
        unused += ["tables"]
    if form == "plain" or dtype not in TOLERANCES:
        unused += ["lines", "far_start"]
    if form != "learned":
        unused += ["tangents", "d_coefficient"]
    if form not in ("packed", "windowed"):
        unused += ["starts", "ends"]
    if form != "windowed":
        unused += ["window"]
    return unused


def resources(compiled: Any) -> dict[str, int]:
    """Registers and spilled bytes per thread, shared memory per program, counts of instructions.

    `loop` counts the instructions of the shortest loop over tiles, the loop over far tiles if the
    kernel has it. `near` counts the next loop, over tiles without a mask. Both are 0 for float32,
    which has no matrix units. `waits` counts waits for wgmma.
    """
    from triton.backends.nvidia import __file__ as backend

    tools = Path(backend).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = output_of(tools / "cuobjdump", "--dump-resource-usage", cubin)
        code = output_of(tools / "nvdisasm", "-c", cubin)
    loop, near, *_ = [*sorted(loops_with_products(code)), 0, 0]
    numbers = {
        "registers": number_after("REG", usage),
        "stack": number_after("STACK", usage),
        "shared": compiled.metadata.shared,
        "loop": loop,
        "near": near,
    }
    for kind in ("HGMMA", "HMMA", "LDG", "LDL", "STL", "MUFU"):
        numbers[kind] = len(re.findall(rf"\b{kind}\b", code))
    numbers["waits"] = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    return numbers


def output_of(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number_after(name: str, text: str) -> int:
    found = re.search(rf"{name}:(\d+)", text)
    assert found is not None, name
    return int(found.group(1))


def loops_with_products(code: str) -> list[int]:
    """The number of instructions of each loop with matrix products in a listing."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    lengths: list[int] = []
    for line in map(str.strip, code.splitlines()):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.match(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(instruction.group(1))
            target = re.search(r"BRA.*?(\.L_x_\d+)", instructions[-1])
            if target and target.group(1) in labels:
                body = instructions[labels[target.group(1)] :]
                if len(re.findall(r"\bHG?MMA\b", "\n".join(body))) > 1:
                    lengths.append(len(body))
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--group", type=int, default=1, help="query heads that share a key head")
    parser.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--form", nargs="+", default=["dense"], choices=FORMS)
    parser.add_argument("--precision", nargs="+", default=["bfloat16"], choices=PRECISIONS)
    options = parser.parse_args()
    chosen = (options.precision, options.capability, options.width, options.kernel, options.form)
    for precision, capability, width, kernel, form in itertools.product(*chosen):
        compiled = compile_kernel(kernel, form, width, capability, options.group, precision)
        taken = resources(compiled)
        numbers = "  ".join(f"{name} {value}" for name, value in taken.items())
        echo(f"sm_{capability}  {precision:8s}  D {width:3d}  {form:8s}  {kernel}: {numbers}")


if __name__ == "__main__":
    main()

"""Our Triton kernels at six ragged shapes, small enough for a memory checker, forward and backward.

    compute-sanitizer python -m anlit.benchmarks.gpu.ragged --output DIR

On a CPU Triton's interpreter runs them.
"""

import argparse
import os
import sys

CASES = (
    ("plain", 1, 64, False),
    ("scale-invariant", 129, 64, False),
    ("scale-invariant-learned", 200, 128, True),
    ("window-scale-invariant", 1100, 64, False),
    ("alibi", 77, 80, True),
    ("log-bias", 333, 256, False),
)
"""Mechanism, length, head width, packed documents."""
TOY_LENGTH, TOY_WIDTH = 19, 16


def main(argv: list[str]) -> int:
    """Returns 1 if a case is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(argv)
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, by Lightning already
    import torch

    from anlit.attention.backends import triton
    from anlit.attention.choice import proof
    from anlit.benchmarks.attention.measure import inputs_of
    from anlit.benchmarks.attention.shapes import Shape
    from anlit.benchmarks.record import Record, Table

    device = torch.device(given.device)
    dtype = torch.float32 if given.device == "cpu" else torch.bfloat16
    record = Record("ragged", argv, given.output, device, cases=[])
    wrong = 0
    for mechanism, length, width, documents in CASES:
        if device.type == "cpu":
            length, width = min(length, TOY_LENGTH), TOY_WIDTH
        shape = Shape(width, length, documents, 2, 2)
        ours, others = (inputs_of(mechanism, shape, device, dtype) for _ in range(2))
        errors = proof.errors(ours.both(triton.attend), proof.reference(others), ours.probe)
        reason = proof.wrong(errors, dtype)
        wrong += reason is not None
        record.values["cases"].append({"label": f"{mechanism}, {shape.label}", "error": errors, "reason": reason})
        record.keep()
    rows = [[case["label"], f"{max(case['error'].values()):.0e}", case["reason"] or "right"]
            for case in record.values["cases"]]  # fmt: skip
    record.finish([Table("Relative errors", ("", "largest", ""), rows, (0, 2))])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The GPUs that sizes are estimated for, from NVIDIA's data sheets (SXM); without torch, for --help."""

DENSE_BF16 = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
"""FLOP/s without sparsity."""
GPU_BYTES = {"A100": 80e9, "H100": 80e9, "H200": 141e9}

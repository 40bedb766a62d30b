"""The smallest models that the benchmarks of training steps are tested with."""

import torch

from anlit.benchmarks.size import Size

CPU = torch.device("cpu")
TINY = Size(16, 2, 2, 64, 8, 2, torch.float32)
SHAPE = ["--d_model", "16", "--n_layers", "2", "--n_heads", "2", "--vocab_size", "64", "--length", "8", "--batch", "2"]

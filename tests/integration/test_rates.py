"""`anlit fit` with factors of the rate and a base: what is logged, kept, continued and annealed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from anlit.cli import main
from anlit.training.optim.schedule import Cosine
from tests.integration.conftest import (
    Train,
    fit_arguments,
    last_checkpoint,
    scalars,
    signal_at,
    same_state,
)
from tests.integration.ranks import FSDP, column, run_ranks

STEPS = 12
FLAGS = (
    f"--trainer.max_steps={STEPS}",
    "--model.lr_factors.embedding=10",
    "--model.lr_factors.matrices=0.5",
    "--model.base_d_model=16",
    "--model.base_n_layers=1",
    "--trainer.callbacks+=LearningRateMonitor",
)
PEAK = 1e-3
HALF = 0.5 / 2
"""The factor of the matrices of GPT+, at twice the base's width and depth."""
PEAKS = {
    "matrices": PEAK * HALF,
    "residual_matrices": PEAK * HALF / 2,
    "embedding": PEAK * 10,
    "head": PEAK / 2,
    "vectors": PEAK,
}


@pytest.fixture(scope="module")
def scaled(trained: Train) -> Path:
    return trained(*FLAGS, model="GPT")

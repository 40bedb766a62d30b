"""One concern per file; `anlit.cli` puts them all into every run."""

from anlit.training.callbacks.attention_statistics import AttentionStatistics
from anlit.training.callbacks.checkpoints import BestCheckpoint, LastCheckpoint
from anlit.training.callbacks.finite import FiniteCheckpoints, StopOnNonFinite
from anlit.training.callbacks.hyperparameters import HyperParameters
from anlit.training.callbacks.learning_rate_range import LearningRateRange
from anlit.training.callbacks.loss_guard import LossGuard
from anlit.training.callbacks.metrics_on_resume import MetricsOnResume
from anlit.training.callbacks.norms import NormMonitor
from anlit.training.callbacks.predictions import Predictions
from anlit.training.callbacks.progress import RunProgress
from anlit.training.callbacks.random_state import RandomState
from anlit.training.callbacks.run_record import RunRecord
from anlit.training.callbacks.throughput import Throughput
from anlit.training.callbacks.whole_steps import WholeSteps

__all__ = [
    "AttentionStatistics",
    "BestCheckpoint",
    "FiniteCheckpoints",
    "HyperParameters",
    "LastCheckpoint",
    "LearningRateRange",
    "LossGuard",
    "MetricsOnResume",
    "NormMonitor",
    "Predictions",
    "RandomState",
    "RunProgress",
    "RunRecord",
    "StopOnNonFinite",
    "Throughput",
    "WholeSteps",
]

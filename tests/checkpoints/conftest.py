"""The prepared folder and the run that the tests of evaluations have."""

from tests.evaluation.conftest import data, run

__all__ = ["data", "run"]

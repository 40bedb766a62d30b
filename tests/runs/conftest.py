"""The synthetic run folders of the tests of compare."""

from tests.compare.conftest import make_run  # noqa: F401

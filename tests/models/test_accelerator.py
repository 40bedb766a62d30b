"""What would fail or wait on a GPU, found without one: see `tests.models.accelerator`."""

import json
import subprocess
import sys

import pytest
from torch.utils import backend_registration

from tests.models.tiny import ARCHITECTURES

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a device from Python",
)


@pytest.fixture(scope="module")
def found() -> dict[str, str | None]:
    command = [sys.executable, "-m", "tests.models.accelerator"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    results: dict[str, str | None] = json.loads(run.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_mixes_no_devices_and_waits_for_nothing(architecture, found) -> None:
    own = {name: error for name, error in found.items() if name.startswith(f"{architecture.__name__},")}
    assert len(own) == 23
    assert not any(own.values()), "\n".join(f"{name}: {error}" for name, error in own.items() if error)


def test_it_would_be_seen(found) -> None:
    assert "DataDependentOutputException" in (found["waiting"] or "")
    assert "same device" in (found["mixing"] or "")

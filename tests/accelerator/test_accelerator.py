import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.accelerator.device import CAN_REGISTER
from tests.accelerator.fit import LAST_STEP, LOGGED_EVERY
from tests.accelerator.step import DENSE_TOO, SETTINGS, TO_BE_SEEN

pytestmark = pytest.mark.skipif(
    not CAN_REGISTER, reason="this torch cannot register a device from Python"
)


@pytest.fixture(scope="module")
def printed() -> list[Any]:
    """In a process of its own, because a device cannot be removed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.step"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_step_mixes_no_devices_waits_for_nothing_and_makes_no_mask_of_all_pairs(printed) -> None:
    errors, _ = printed
    assert len(errors) == len(SETTINGS) + DENSE_TOO + len(TO_BE_SEEN)
    seen = [
        f"{name}: {error}" for name, error in errors.items() if error and name not in TO_BE_SEEN
    ]
    assert not seen, "\n".join(seen)


def test_it_would_be_seen(printed) -> None:
    errors, _ = printed
    assert "DataDependentOutputException" in (errors["waiting"] or "")
    assert re.search(
        "same device|two different devices", errors["mixing"] or ""
    )  # torch 2.13, 2.11


def test_a_run_waits_only_where_it_logs(printed) -> None:
    """Neither our hooks and callbacks nor Lightning's do, with a progress bar and checkpoints; once it has begun."""
    for name, waits in printed[1].items():
        assert any("a number is read" in wait for wait in waits[str(LOGGED_EVERY)])
        others = {step: seen for step, seen in waits.items() if seen and 1 < int(step) < LAST_STEP}
        assert others.keys() == {str(LOGGED_EVERY)}, f"{name}: {others}"

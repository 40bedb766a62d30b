import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.accelerator.device import CAN_REGISTER
from tests.accelerator.fit import LAST_STEP, LOGGED_EVERY
from tests.accelerator.step import MISTAKES, N_UNPACKED, SETTINGS

pytestmark = pytest.mark.skipif(
    not CAN_REGISTER, reason="this torch cannot register a device from Python"
)


@pytest.fixture(scope="module")
def printed() -> list[Any]:
    """In a separate process, because a device cannot be removed."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.step"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_step_mixes_no_devices_waits_for_nothing_and_makes_no_mask_of_all_pairs(printed) -> None:
    errors, _ = printed
    assert len(errors) == len(SETTINGS) + N_UNPACKED + len(MISTAKES)

    failed = []
    for name, error in errors.items():
        if error and name not in MISTAKES:
            failed.append(f"{name}: {error}")

    assert not failed, "\n".join(failed)


def test_waiting_and_mixing_would_be_noticed(printed) -> None:
    errors, _ = printed
    assert "DataDependentOutputException" in (errors["waiting"] or "")
    # The messages of torch 2.13 and 2.11
    assert re.search("same device|two different devices", errors["mixing"] or "")


def test_a_run_waits_only_where_it_logs(printed) -> None:
    """Callbacks, Lightning's hooks, progress bar and checkpoints do not wait after step 1."""
    _, waits_by_architecture = printed
    for name, waits in waits_by_architecture.items():
        waiting_steps = {int(step) for step in waits if waits[step] and 1 < int(step) < LAST_STEP}

        assert waiting_steps == {LOGGED_EVERY}, f"{name}: {waits}"
        assert any("a number is read" in wait for wait in waits[str(LOGGED_EVERY)])

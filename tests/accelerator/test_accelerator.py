import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.accelerator.device import CAN_REGISTER
from tests.accelerator.fit import LAST_STEP, LOGGED_EVERY
from tests.models.tiny import ARCHITECTURES

pytestmark = pytest.mark.skipif(not CAN_REGISTER, reason="this torch cannot register a device from Python")
NAMES = [architecture.__name__ for architecture in ARCHITECTURES]
architectures = pytest.mark.parametrize("architecture", NAMES)


def printed_by(*module: str) -> Any:
    run = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return printed_by("tests.accelerator.step", request.param)


parts = pytest.mark.parametrize("found", ["third", pytest.param("all", marks=pytest.mark.slow)], indirect=True)


@parts
def test_every_setting_is_tried(found: dict[str, str | None]) -> None:
    settings = {name.partition(", ")[2] for name in found if name.startswith(tuple(NAMES))}
    assert len(settings) == 27


@parts
@architectures
def test_a_step_mixes_no_devices_and_waits_for_nothing(architecture: str, found: dict[str, str | None]) -> None:
    own = {name: error for name, error in found.items() if name.startswith(f"{architecture},")}
    assert len(own) >= 7
    assert not any(own.values()), "\n".join(f"{name}: {error}" for name, error in own.items() if error)


@parts
def test_attention_by_pytorch_makes_no_mask_of_all_pairs(found: dict[str, str | None]) -> None:
    long = {name: error for name, error in found.items() if name.startswith("long")}
    assert len(long) == 5
    assert not any(long.values()), "\n".join(f"{name}: {error}" for name, error in long.items() if error)


@parts
def test_it_would_be_seen(found: dict[str, str | None]) -> None:
    assert "DataDependentOutputException" in (found["waiting"] or "")
    assert re.search("same device|two different devices", found["mixing"] or "")  # torch 2.13, 2.11


@pytest.fixture(scope="module")
def waits_of() -> dict[str, dict[str, list[str]]]:
    return printed_by("tests.accelerator.fit", *NAMES)


@architectures
def test_a_run_waits_only_where_it_logs(architecture: str, waits_of: dict[str, dict[str, list[str]]]) -> None:
    """Neither our hooks and callbacks nor Lightning's do, with a progress bar and checkpoints; once it has begun."""
    waits = waits_of[architecture]
    assert any("a number is read" in wait for wait in waits[str(LOGGED_EVERY)])
    for step in range(2, LAST_STEP):
        assert step == LOGGED_EVERY or not waits.get(str(step)), f"step {step}: {waits[str(step)]}"

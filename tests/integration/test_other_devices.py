"""A device that is neither a CPU nor a CUDA GPU, as Apple's MPS, is refused in one sentence."""

from pathlib import Path

import pytest
import torch
from lightning.fabric.accelerators import mps
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from anlit import GPT
from anlit.errors import UserError
from anlit.training.load_model import find_device
from tests.accelerator.fit import NoCPU
from tests.data.modules import quiet_trainer
from tests.integration.conftest import fit_arguments
from tests.nn.models.tiny import batches, tiny


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which Lightning finds MPS."""
    for accelerator in (MPSAccelerator, mps.MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: True))
        monkeypatch.setattr(accelerator, "auto_device_count", staticmethod(lambda: 1))


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_command_refuses_mps_that_auto_has_found(
    apple: None, shards: Path, finished: Path, tmp_path: Path, refusal, command: str
) -> None:
    arguments = {
        "fit": fit_arguments(shards, tmp_path / "run", "--trainer.accelerator=auto"),
        "validate": ["validate", str(finished), "--trainer.accelerator=auto"],
    }

    error = refusal(*arguments[command])

    assert "--trainer.accelerator leads to a device of the type mps, and anlit computes on" in error
    assert error.endswith("set --trainer.accelerator cpu")
    assert not (tmp_path / "run").exists()


def test_a_trainer_in_python_is_refused_before_it_reads_data() -> None:
    strategy = SingleDeviceStrategy(torch.device("mps"), accelerator=NoCPU())
    trainer = quiet_trainer(max_steps=1, accelerator="auto", strategy=strategy)

    with pytest.raises(UserError, match="leads to a device of the type mps"):
        trainer.fit(tiny(GPT), batches(4, 16))


def test_a_tool_refuses_mps_before_it_reads_the_checkpoint() -> None:
    with pytest.raises(UserError, match=r"--device leads to a device of the type mps, .* cpu$"):
        find_device("mps")

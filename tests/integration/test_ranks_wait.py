"""Between the steps that are logged, ranks meet for their gradients only: other meetings would wait for the device."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import distributed

from anlit.cli import main
from tests.integration import ranks
from tests.integration.conftest import fit_arguments

LOGGED_EVERY, LAST_STEP = 5, 12


class Meetings(L.Callback):
    """Notes by optimizer step which collective calls Python makes and waits for, and leaves them beside the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.seen = folder, 0, list[tuple[int, str]]()
        for name in ("barrier", "broadcast", "all_reduce", "all_gather"):
            setattr(distributed, name, self._noted(name, getattr(distributed, name)))

    def _noted(self, name: str, call: Any) -> Any:
        def run(*arguments: Any, **settings: Any) -> Any:
            if not settings.get("async_op"):
                self.seen.append((self.step, name))
            return call(*arguments, **settings)

        return run

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps([self.step, self.seen]))


@pytest.mark.parametrize("strategy", [ranks.DDP, ranks.FSDP], ids=["ddp", "fsdp"])
def test_ranks_wait_for_each_other_only_where_they_log(
    strategy: list[str], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(arguments: list[str]) -> int:
        monkeypatch.setattr("anlit.commands.fit.MetricsOnResume", lambda: Meetings(tmp_path))
        return main(arguments)

    monkeypatch.setattr(ranks, "main", watched)
    steps = [f"--trainer.max_steps={LAST_STEP}", f"--trainer.log_every_n_steps={LOGGED_EVERY}"]
    shown = ["--trainer.enable_progress_bar=true", "--checkpoint_every_n_steps=1000"]
    assert ranks.run_ranks(fit_arguments(shards, tmp_path / "run", *strategy, *steps, *shown), 2) == [0, 0]
    reports = list(tmp_path.glob("*.json"))
    assert len(reports) == 2
    for report in reports:
        last, seen = json.loads(report.read_text())
        assert last == LAST_STEP
        assert [name for step, name in seen if step == LOGGED_EVERY], "the loss is that of all ranks there"
        between = [(step, name) for step, name in seen if 0 < step < LAST_STEP and step % LOGGED_EVERY]
        assert not between

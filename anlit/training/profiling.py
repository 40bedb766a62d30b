"""A trace of a few training steps for Perfetto, chrome://tracing or TensorBoard."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch import distributed

from anlit.errors import UserError
from anlit.lightning_internals import is_profiling_training


class TraceProfiler(PyTorchProfiler):
    """Lightning's PyTorchProfiler with a schedule in numbers of steps. It writes into `profile/` of the run folder.

    Each rank writes `training-rank<number>.pt.trace.json` after the `active` steps, and at the end of the run a table
    of the time per operator, `fit-profile.txt`. Steps are micro-batches. Validation between them is traced too and
    disturbs the trace, so turn it off. Profiled steps are slower than others, and so, slightly, are all later steps of
    the run.

    Args:
        wait: Steps before tracing starts, for compilation and first allocations.
        warmup: Steps that are traced and discarded, because the first ones include the start of the tracer.
        active: Steps to keep.
        settings: Of PyTorchProfiler, such as `record_shapes` and `dirpath`; in YAML `dict_kwargs` takes those of
            torch.profiler.profile, such as `with_stack`.
    """

    def __init__(self, wait: int = 5, warmup: int = 2, active: int = 3, **settings: Any) -> None:
        if wait < 0 or warmup < 0 or active < 1:
            raise UserError(
                f"TraceProfiler has wait={wait}, warmup={warmup}, active={active}: active must be at least 1, "
                "and none negative"
            )
        schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        super().__init__(filename="profile", schedule=schedule, on_trace_ready=self._write_trace, **settings)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        in_run = log_dir and stage == "fit"  # other commands have no run folder
        super().setup(stage, local_rank, str(Path(log_dir or "") / "profile") if in_run else None)

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        if self.dirpath is None:  # no logger, and so no run folder
            return
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
        folder = Path(self.dirpath)
        folder.mkdir(parents=True, exist_ok=True)
        phase = "training" if is_profiling_training(self) else "validation"
        profiler.export_chrome_trace(str(folder / f"{phase}-rank{rank}.pt.trace.json"))

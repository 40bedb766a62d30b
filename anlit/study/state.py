"""The state of a planned run, from its folder and from the launcher's notes in it."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from anlit.errors import PREEMPTED
from anlit.io.provenance import utc_time
from anlit.io.read import read_json
from anlit.io.write import write_json
from anlit.runs.folders import LAUNCHES, RECORD, load_run, read_run_record

LOG = "fit.log"
LAUNCHES_SCHEMA = [{"started": str, "how": str, "ended": str, "exit_code": int}]
MAX_LOST_STARTS = 3
"""A run fails after this many starts on a cluster without a recorded end."""


class State(NamedTuple):
    """The state of a run.

    `finished`; `failed`, also if the loss diverged; `interrupted`, to be continued; `pending`, not
    started.
    """

    status: Literal["finished", "failed", "interrupted", "pending"]
    reason: str = ""
    """Why it failed."""

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "failed")


def read_state(folder: Path) -> State:
    """Read the state of the run in `folder`."""
    record = read_run_record(folder)
    status = record.get("status")
    if status == "finished":
        if load_run(folder).diverged:
            return State("failed", "diverged: its last validation loss is not finite")
        return State("finished")
    if status == "failed":
        error = str(record.get("error") or "")
        return State("failed", error.partition("\n")[0] or _last_log_line(folder))
    launches = read_launches(folder)
    exit_code = launches[-1].get("exit_code") if launches else None
    if exit_code == PREEMPTED or status == "interrupted":
        return State("interrupted")
    if exit_code is not None and exit_code < 0:
        return State("failed", f"killed by signal {-exit_code}")
    if exit_code is not None:
        return State("failed", _last_log_line(folder) or f"exit code {exit_code}")
    starts_on_cluster = [launch for launch in launches if _is_on_cluster(launch)]
    if len(starts_on_cluster) >= MAX_LOST_STARTS:
        return State("failed", f"ended {MAX_LOST_STARTS} times without saying why, see {LOG}")
    return State("interrupted") if launches or record else State("pending")


def _is_on_cluster(launch: dict[str, Any]) -> bool:
    return str(launch.get("how")).startswith("slurm")


def _last_log_line(folder: Path) -> str:
    path = folder / LOG
    log = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return log.rpartition("\n")[2].strip()


def note_start(folder: Path, how: str) -> None:
    """Note that a run is about to be started or submitted; `how` says where."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / LAUNCHES, [*read_launches(folder), {"started": utc_time(), "how": how}])


def note_end(folder: Path, exit_code: int) -> None:
    """Note that a run has ended with an exit code, which is negative for a signal."""
    *earlier, last = read_launches(folder)
    ended = last | {"ended": utc_time(), "exit_code": exit_code}
    write_json(folder / LAUNCHES, [*earlier, ended])


def note_failure(folder: Path, reason: str) -> None:
    """Note that a run failed before it was started."""
    note_start(folder, "local")
    (folder / LOG).write_text(f"{reason}\n", encoding="utf-8")
    note_end(folder, 2)


def forget_failure(folder: Path) -> None:
    """Let a failed run be tried again, from its last checkpoint if it has one."""
    (folder / LAUNCHES).unlink(missing_ok=True)
    record = read_run_record(folder)
    if record.get("status") == "failed":
        write_json(folder / RECORD, record | {"status": "interrupted"})


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """The starts of a run: {started, how, ended, exit_code}.

    The last two are missing if the end was not seen.
    """
    advice = "remove it, and the run goes on from its last checkpoint"
    return list(read_json(folder / LAUNCHES, LAUNCHES_SCHEMA, advice, missing=[]))

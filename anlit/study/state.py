"""The state of a planned run, from its folder and from the launcher's notes there."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from anlit.errors import PREEMPTED
from anlit.io.provenance import now
from anlit.io.read import read_json
from anlit.io.write import write_json
from anlit.runs.folders import LAUNCHES, RECORD, RECORD_SCHEMA, load_run

LOG = "fit.log"
LAUNCHES_SCHEMA = [{"started": str, "how": str, "ended": str, "exit_code": int}]
MOST_LOST = 3
"""A run is given up after this many starts on a cluster without a recorded end."""


class State(NamedTuple):
    """finished; failed, also if it diverged, for a `reason`; interrupted: to be continued; pending: not begun."""

    status: Literal["finished", "failed", "interrupted", "pending"]
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in ("finished", "failed")


def state_of(folder: Path) -> State:
    """The state of the run in `folder`."""
    record, launches = read_json(folder / RECORD, RECORD_SCHEMA, missing={}), read_launches(folder)
    status, code = record.get("status"), launches[-1].get("exit_code") if launches else None
    log = (folder / LOG).read_text(errors="replace").strip() if (folder / LOG).is_file() else ""
    last_line = log.rpartition("\n")[2].strip()
    if status == "finished":
        diverged = load_run(folder).diverged
        return (
            State("failed", "diverged: its last validation loss is not finite")
            if diverged
            else State("finished")
        )
    if status == "failed":
        return State("failed", str(record.get("error") or "").partition("\n")[0] or last_line)
    if code == PREEMPTED or status == "interrupted":
        return State("interrupted")
    if code is not None:
        return State(
            "failed", f"killed by signal {-code}" if code < 0 else last_line or f"exit code {code}"
        )
    if sum(str(launch.get("how")).startswith("slurm") for launch in launches) >= MOST_LOST:
        return State("failed", f"ended {MOST_LOST} times without saying why, see {LOG}")
    return State("interrupted") if launches or record else State("pending")


def note_start(folder: Path, how: str) -> None:
    """Note that a run is about to be started or submitted; `how` says where."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / LAUNCHES, [*read_launches(folder), {"started": now(), "how": how}])


def note_end(folder: Path, code: int) -> None:
    """Note that a run has ended with an exit code, which is negative for a signal."""
    *before, last = read_launches(folder)
    write_json(folder / LAUNCHES, [*before, last | {"ended": now(), "exit_code": code}])


def forget_failure(folder: Path) -> None:
    """Let a failed run be tried again, from its last checkpoint where it has one."""
    (folder / LAUNCHES).unlink(missing_ok=True)
    if (record := read_json(folder / RECORD, RECORD_SCHEMA, missing={})).get("status") == "failed":
        write_json(folder / RECORD, record | {"status": "interrupted"})


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """One entry per start: {started, how, ended, exit_code}; the last two are missing if the end was not seen."""
    advice = "remove it, and the run goes on from its last checkpoint"
    return list(read_json(folder / LAUNCHES, LAUNCHES_SCHEMA, advice, missing=[]))

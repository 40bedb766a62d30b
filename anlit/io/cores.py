"""The processor cores that a process may use. Without torch."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
"""Linux lists the control groups of a process here, a hierarchy a line."""
HIERARCHIES = Path("/sys/fs/cgroup")
"""Folder of version 2's hierarchy; version 1 has a folder for each controller, such as `cpu`."""


def cores() -> int:
    """Return the number of cores that this process may use, from affinity and quota.

    Slurm, taskset and `docker --cpuset-cpus` give cores. `docker --cpus` and Kubernetes' limits
    give a share of the time of all cores, which is rounded up.
    """
    n_cores = usable_cores()
    quota = cpu_quota()
    return n_cores if quota is None else min(n_cores, math.ceil(quota))


def usable_cores() -> int:
    """Return the number of cores on which the system may run this process."""
    return len(os.sched_getaffinity(0))


def cpu_quota(groups: Path = GROUPS_OF_PROCESS, hierarchies: Path = HIERARCHIES) -> float | None:
    """Return how many cores' time the control groups of this process may use; None without a limit.

    A group is also limited by the groups that contain it.
    """
    quotas: list[float] = []
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            hierarchy = hierarchies / "cpu" if controllers else hierarchies
            quotas += _quotas(hierarchy, PurePosixPath(path.lstrip("/")))
    return min(quotas, default=None)


def _quotas(hierarchy: Path, path: PurePosixPath) -> Iterator[float]:
    """The limits of a group and of those that contain it, in cores.

    A container may see its own group as the root, and no folder at its path.
    """
    for group in (path, *path.parents):
        with suppress(OSError, ValueError):
            quota, period = _quota_and_period(hierarchy / group)
            if quota > 0:
                yield quota / period


def _quota_and_period(folder: Path) -> tuple[int, int]:
    """Microseconds of a core's time, and of the period to which they apply.

    Raises OSError without these files. ValueError or a quota of −1 means no limit.
    """
    if (folder / "cpu.max").is_file():
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
    return int(quota), int(period)

"""How many CPUs this process may use, and a thread pool that does without threads where new ones are not safe."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container its limits."""


def usable_cpus(group: Path = CONTROL_GROUP) -> int:
    """Return how many CPUs this process may use: no more than its affinity and the quota of its container allow."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(cpu_quota(group) or allowed)))


def cpu_quota(group: Path = CONTROL_GROUP) -> float | None:
    """Return how many CPUs a container may use, e.g. 1.5 of ``docker run --cpus 1.5``; None without a limit.

    It is in one file in version 2 of control groups, and in two in version 1.
    """
    try:
        if (both := group / "cpu.max").is_file():
            quota, period = both.read_text("utf-8").split()
        else:
            quota, period = (
                (group / "cpu" / f"cpu.cfs_{name}_us").read_text("utf-8").strip() for name in ("quota", "period")
            )
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def thread_pool(threads: int | None = None) -> Executor:
    """Return an executor with that many threads (default: as for ``ThreadPoolExecutor``). If the address space is
    limited, tasks run in the calling thread.

    Python waits forever for a thread that cannot allocate memory at its start.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return ThreadPoolExecutor(threads) if limit == resource.RLIM_INFINITY else _InlineExecutor()


class _InlineExecutor(Executor):
    """Executor that runs each task immediately in the calling thread."""

    def submit(self, task: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        done: Future[Result] = Future()
        try:
            done.set_result(task(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

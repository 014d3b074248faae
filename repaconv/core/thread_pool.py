"""CPUs of this process, and a thread pool that falls back to the calling thread where new threads are not safe."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

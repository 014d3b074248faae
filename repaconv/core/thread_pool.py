"""Work beside the thread that asked for it, where threads are safe to have."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def workers(threads: int | None = None) -> Executor:
    """So many threads, or as many as there are processors; none where the address space has a limit.

    Python waits without end for a thread that finds no memory as it begins.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return ThreadPoolExecutor(threads) if limit == resource.RLIM_INFINITY else _AtOnce()


class _AtOnce(Executor):
    """Does each task as it is given."""

    def submit(self, task: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        done: Future[Result] = Future()
        try:
            done.set_result(task(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

"""Several calls at once: what a machine gets through, and how long each call takes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CALLS = 4
"""Of a stream in one round: the end, when some streams wait for others, is a small part of it."""


class Burst:
    """Calls of several streams at once, each stream a thread; every stream makes as many, one after the other.

    Attributes:
        calls: Of all streams together.
        calls_ms: Of every single call so far, in no order.
    """

    def __init__(
        self, call: Callable[[], Any], streams: int, calls_ms: list[float] | None = None, calls: int = CALLS
    ) -> None:
        """``call`` may be made from several threads at once; ``calls`` are those of one stream."""
        self.calls = streams * calls
        self.calls_ms = [] if calls_ms is None else calls_ms
        self._call, self._each, self._streams = call, calls, streams
        self._pool = ThreadPoolExecutor(streams)

    def __call__(self) -> None:
        """All of them; what one raises is raised."""
        for stream in [self._pool.submit(self._stream) for _ in range(self._streams)]:
            self.calls_ms += stream.result()

    def _stream(self) -> list[float]:
        found = []
        for _ in range(self._each):
            begin = time.perf_counter_ns()
            self._call()
            found.append((time.perf_counter_ns() - begin) / 1e6)
        return found

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown()

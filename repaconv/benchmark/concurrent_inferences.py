"""Run inferences concurrently in several streams, and record the latency of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CALLS = 4
"""Inferences per stream and round. More of them shorten the share of the end, when some streams are already done."""


class Burst:
    """Concurrent inferences of several streams. Each stream is a thread that runs the same number, one after the other.

    Attributes:
        calls: Inferences of all streams together.
        calls_ms: Latency of every inference so far in milliseconds, in no particular order.
    """

    def __init__(
        self, call: Callable[[], Any], streams: int, calls_ms: list[float] | None = None, calls: int = CALLS
    ) -> None:
        """``call`` runs one inference and must be thread-safe; ``calls`` is the number per stream."""
        self.calls = streams * calls
        self.calls_ms = [] if calls_ms is None else calls_ms
        self._call, self._each, self._streams = call, calls, streams
        self._pool = ThreadPoolExecutor(streams)

    def __call__(self) -> None:
        """Run all inferences; an exception in one of them is raised."""
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
        """Stop the threads."""
        self._pool.shutdown()

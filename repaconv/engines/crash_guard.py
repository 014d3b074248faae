"""Native code that may crash is tried in a process of its own first: a segfault there is a sentence here.

The process is a fresh interpreter, not a fork: a runtime's threads and locks do not survive one. It serves one trial
after the other, so that each runtime is imported once, and ends with the process that asked.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Lock
from typing import Any


class NativeCrash(Exception):
    """The process that tried it is gone.

    Attributes:
        told: How it ended, e.g. ``SIGSEGV`` or ``exit code 3``.
        out_of_memory: Whether the system killed it, as it does where memory runs out.
    """

    def __init__(self, code: int) -> None:
        """``code`` is its return code; a signal is negative, as `subprocess` has it."""
        self.told = _signal(-code) if code < 0 else f"exit code {code}"
        self.out_of_memory = code == -signal.SIGKILL
        super().__init__(self.told)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class _Guard:
    """The process that tries, started when it is first needed, and again after it crashed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection[Any, Any] | None = None
        self._owner = 0

    def attempt(self, function: Callable[..., object], given: tuple[Any, ...]) -> None:
        with self._lock:
            process, line = self._started()
            try:
                line.send((sys.path, str(Path.cwd()), function.__module__, function.__qualname__, given))
                line.recv()
            except (EOFError, ConnectionError):
                code = process.wait()
                self._stop()
                raise NativeCrash(code) from None
            except BaseException:  # Ctrl-C while it works: what it would answer is no longer of use
                self._stop()
                raise

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
        if self._process and self._line and self._owner == os.getpid():
            return self._process, self._line
        ours, theirs = Pipe()
        start = f"import sys; sys.path[:] = {sys.path!r}; from repaconv.engines import crash_guard as guard; "
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{start}guard.serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._line, self._owner = ours, os.getpid()
        return self._process, ours

    def _stop(self) -> None:
        if self._line and self._process and self._owner == os.getpid():
            self._line.close()
            self._process.kill()
            self._process.wait()
        self._process = self._line = None


_GUARD = _Guard()
atexit.register(_GUARD._stop)


def attempt(function: Callable[..., object], *given: Any) -> None:
    """Call a function in a process of its own; what it returns or raises there is dropped.

    Args:
        function: Of a module, which the other process imports.
        given: Its arguments, which can be pickled.

    Raises:
        NativeCrash: If the process did not survive it.
    """
    _GUARD.attempt(function, given)


def serve(descriptor: int) -> None:
    """Do what is asked over this connection, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the one that asked ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # where memory runs out, this process is the one to go
        Path("/proc/self/oom_score_adj").write_text("1000")
    line: Connection[Any, Any] = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        while True:
            sys.path[:], folder, module, name, given = line.recv()
            with suppress(Exception):  # the one that asked meets the same, and tells it
                os.chdir(folder)
                getattr(import_module(module), name)(*given)
            line.send(None)

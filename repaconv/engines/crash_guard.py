"""Try native code that may crash in a separate process, so that a segmentation fault becomes an error message.

The process is a fresh interpreter, not a fork, since a runtime's threads and locks do not survive a fork. It serves all
trials, so that each runtime is imported once, and ends with the parent process.
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
    """The separate process crashed.

    Attributes:
        ending: How the process ended, e.g. ``SIGSEGV`` or ``exit code 3``.
        out_of_memory: Whether it was killed by SIGKILL, as the system does when memory runs out.
    """

    def __init__(self, code: int) -> None:
        """``code`` is the return code of the process; negative for a signal, as in `subprocess`."""
        self.ending = _signal(-code) if code < 0 else f"exit code {code}"
        self.out_of_memory = code == -signal.SIGKILL
        super().__init__(self.ending)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class _Guard:
    """The separate process. It is started when first needed, and again after a crash."""

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
            except BaseException:  # e.g. Ctrl-C: a late answer would be read as that of the next trial
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
    """Call a function in the separate process, and ignore what it returns or raises there.

    Args:
        function: A module-level function, which the other process imports.
        given: Its arguments, which must be picklable.

    Raises:
        NativeCrash: If the process crashed.
    """
    _GUARD.attempt(function, given)


def serve(descriptor: int) -> None:
    """Run the trials received over a connection until the parent closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both processes; the parent ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if memory runs out, the system should kill this process
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    line: Connection[Any, Any] = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        while True:
            sys.path[:], folder, module, name, given = line.recv()
            with suppress(Exception):  # the parent gets the same error and reports it
                os.chdir(folder)
                getattr(import_module(module), name)(*given)
            line.send(None)

"""A function call in a child process, which may crash, hang or use all memory."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

SECONDS, BYTES = 90, 8 << 30
WAITING = 20
"""So many times its seconds of CPU time a call may take in all: other processes may share the CPU."""


def in_a_child(act: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What it gives; a text that begins with ``!`` if it did not end by itself within so much CPU time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        for number, timer, limit in (
            (signal.SIGPROF, signal.ITIMER_PROF, seconds),
            (signal.SIGALRM, signal.ITIMER_REAL, WAITING * seconds),
        ):
            signal.signal(number, signal.SIG_DFL)
            signal.setitimer(timer, limit)
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        try:
            found = act()
        except BaseException as error:
            found = f"!{type(error).__name__}: {error}"[:300]
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        content = said.read()
    _, status = os.waitpid(child, 0)
    return json.loads(content) if content else f"!signal {os.WTERMSIG(status)}"

"""A call in a process of its own, that may crash, hang or take all memory."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

SECONDS, BYTES = 90, 8 << 30


def in_a_child(act: Callable[[], Any], seconds: int = SECONDS) -> Any:
    """What it gives; a text that begins with ``!`` if it did not end by itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(seconds)
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

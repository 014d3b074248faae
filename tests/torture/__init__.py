"""Hostile and damaged input: cases for each kind of file, and the sandbox in which each case is read."""

import gc
import os
import sys


def _by_itself() -> None:
    """What waits for the parent's threads would wait for ever: a runtime's session that the parent dropped, and that
    is collected here; torch, where it has called several."""
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


os.register_at_fork(after_in_child=_by_itself)

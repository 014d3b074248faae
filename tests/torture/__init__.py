"""Hostile and damaged input, and what becomes of it: a corpus a kind of file, and the arena in which each is read."""

import gc
import os

# What the parent dropped is not the child's to collect: a runtime's session would wait for threads that a fork
# leaves behind.
os.register_at_fork(after_in_child=gc.freeze)

"""Hostile and damaged input, and what becomes of it: a corpus a kind of file, and the arena in which each is read."""

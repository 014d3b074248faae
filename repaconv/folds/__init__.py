"""Folds of a graph that somebody else exported: rewrites that need no knowledge of the method."""

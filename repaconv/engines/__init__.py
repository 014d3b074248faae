"""Runtimes, one a file."""

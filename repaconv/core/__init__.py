"""Utilities that every package uses: files, run folders, errors, terminal output, progress, plug-ins."""

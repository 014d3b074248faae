"""Runtimes, one per file, and target devices as TOML files."""

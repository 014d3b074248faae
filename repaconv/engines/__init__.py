"""Inference runtimes, one per module, and target devices as TOML files."""

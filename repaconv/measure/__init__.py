"""Measuring latency, and what may be said of it."""

"""Latency measurement, and what can be concluded from it."""

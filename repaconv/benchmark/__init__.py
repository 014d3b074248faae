"""Measure latency and throughput, and decide what the measurement shows."""

"""Benchmarks on other machines: Dask clusters, ssh, sweeps."""

"""Exact float64 algebra of linear maps over channels and pixels. It uses no files and no networks."""

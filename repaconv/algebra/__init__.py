"""Exact float64 algebra of linear maps over channels. It uses no files and no networks."""

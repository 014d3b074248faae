"""Exact float64 algebra of linear maps over channels. No files, no networks."""

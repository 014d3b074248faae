"""Many devices: the same measurement on workers of a Dask cluster, on a lone board by ssh, and over whole matrices."""

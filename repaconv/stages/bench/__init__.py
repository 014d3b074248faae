"""`bench`, `bench --estimate`, `bench --objective throughput` and `compare`."""

"""`deploy`: every stage in a row for one target."""

"""`deploy`: run every stage for one target."""

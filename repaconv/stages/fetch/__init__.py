"""`fetch`: download a model and pin it by its hashes."""

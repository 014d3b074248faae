"""One folder per paper: its equations and fold, the reading of its checkpoints, its published models."""

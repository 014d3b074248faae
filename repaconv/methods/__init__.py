"""One folder per paper: `paper` has its equations, `reading` its checkpoints, `published` its models."""

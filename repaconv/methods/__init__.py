"""One folder per paper: `paper` has its equations, `reading` reads its checkpoints, `published` builds its models."""

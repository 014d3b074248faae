"""One paper a folder: `paper` is its page, `reading` understands its checkpoints, `published` has its models."""

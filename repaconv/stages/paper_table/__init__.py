"""`table`: the figures of a paper next to ours."""

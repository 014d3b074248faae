"""`run`, `gate` and `new-recipe`: recipes and their plan."""

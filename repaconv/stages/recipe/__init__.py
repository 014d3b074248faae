"""`run`, `gate` and `new-recipe`: recipes and the plans made of them."""

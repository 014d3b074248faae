"""Exact rewrites that make a graph faster on some targets; a rewrite preset names those to use."""

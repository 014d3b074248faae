"""Rewrites that compute the same numbers faster on a target."""

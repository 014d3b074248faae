"""Folds: what makes a graph of any origin smaller. `fold` has their order; read-tokens is a registered rewrite as well.

A form names read-tokens as it names any rewrite, by its registered name, so that `forms/` need not know this room.
"""

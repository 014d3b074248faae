"""Modules in memory: edits that a module's shape suggests, and the whole before against after.

- `edits`: guesses from names and kinds (`guesses`), each run in the part that it is of.
- `structure`: folds by what one run does, seen step by step (`trace`): values as kernels of others (`forms`), parts as
  chains of layers and children (`chains`), where a scale can go (`scales`); a fold is a value (`changes`).
- `whole`: the module run on what it takes (`inputs`), in float64 (`calls`).
"""

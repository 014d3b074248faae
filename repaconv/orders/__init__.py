"""What a stage is asked for: one frozen dataclass a stage, and all that is derived from its fields.

The command's options, the arguments in Python, a recipe's keys, a cluster's jobs, keys of caches and the words by
which an artefact says what it was asked for come from here. A new knob is a field of `repaconv.orders.stages`.
"""

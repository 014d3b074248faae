"""Measuring on an NVIDIA card that is elsewhere: a kit that needs no network there, and what becomes of its result.

- `plan` says what is measured: the steps, the most important first.
- `kit` puts everything that a bare machine may lack into pieces, and writes `gpu.sh`, which is `unpacking` in a shell.
- `session` runs the steps there, each as a process of its own: `models` makes the networks, `steps` measures them.
- `judging` takes the result in, and `tables` writes what docs/gpu.md shows of it.
"""

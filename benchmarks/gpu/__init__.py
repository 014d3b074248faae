"""Measure on an NVIDIA GPU that is elsewhere: a kit that needs no network there, and what becomes of its result.

- `plan` lists the steps; `step_selection` chooses those with the largest expected gain for their seconds.
- `kit` puts everything that a bare machine may lack into pieces, and writes `gpu.sh`, which has `kit_installer` in it.
- `session` runs the steps there, each as a process of its own: `models` makes the networks, `steps` measures them.
- `result_evaluation` evaluates the result, `tables` writes it into docs/gpu.md, and `target_presets` into the targets.
"""

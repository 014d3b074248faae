"""Measure on a remote NVIDIA GPU: a kit that needs no network access there, and the evaluation of its result.

- `plan` lists the steps; `step_selection` chooses those with the largest expected gain for their seconds.
- `kit` packs everything that a bare machine may lack into pieces, and writes `gpu.sh`, which contains `kit_installer`.
- `session` runs the steps there, each in a process of its own: `models` makes the networks, `steps` measures them.
- `result_evaluation` evaluates the result, `tables` writes it into docs/gpu.md, and `target_presets` into the targets.
"""

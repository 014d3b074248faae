"""Manual baselines: the inference-time networks as users write them from the papers' code, exported and simplified.

`benchmarks/manual_baseline_speed.py` measures repaconv against them. There is one file per method, rebuilt from what is
known of the official code, in plain torch without repaconv. Each loads a training-time checkpoint by the official
conversion and does no more; `tests/test_manual_baselines.py` compares them with the training-time networks.
"""

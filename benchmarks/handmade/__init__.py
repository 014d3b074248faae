"""The deploy forms as somebody makes them by hand from the papers' own code, exported and simplified as usual.

They are what `benchmarks/deploy_forms.py` measures repaconv against: one file a method, rebuilt from what is known of
the official code, plain torch and nothing of repaconv. Each is loaded from a training checkpoint by what the official
conversion does and no more; `tests/test_handmade.py` holds them against the training forms.
"""

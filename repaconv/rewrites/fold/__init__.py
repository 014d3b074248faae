"""Rewrites that make an ONNX graph smaller; `fold_pipeline` lists them in the order in which they run."""

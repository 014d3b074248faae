"""Rewrites that make an ONNX graph smaller; `fold_pipeline` has their order."""

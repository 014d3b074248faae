"""Exact rewrites of ONNX graphs: `fold` makes a graph smaller, `speed` makes it faster, `presets` loads rewrite
presets."""

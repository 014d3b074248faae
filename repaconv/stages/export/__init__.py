"""`export`: the folded model as ONNX."""

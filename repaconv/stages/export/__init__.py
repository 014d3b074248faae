"""`export`: write the folded model as ONNX."""

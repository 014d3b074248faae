"""How an ONNX graph is seen: values, shapes, what holds which numbers of what, and what it costs."""

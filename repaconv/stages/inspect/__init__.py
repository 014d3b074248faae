"""`inspect`: describe the contents of a checkpoint, an ONNX model or an engine."""

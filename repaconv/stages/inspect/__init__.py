"""`inspect`: what a checkpoint, an ONNX model or an engine contains."""

"""`fold`: fold a checkpoint, a named architecture, an ONNX model or a live module."""

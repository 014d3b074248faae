"""Export torch modules to ONNX, simplify, lower the opset, and convert to lower precision."""

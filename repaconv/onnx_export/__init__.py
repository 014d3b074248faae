"""torch to ONNX, simplifiers, opset lowering, lower precision."""

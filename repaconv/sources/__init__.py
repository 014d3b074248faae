"""The source model of a run (a method's checkpoint, a known architecture, an ONNX model) behind one protocol."""

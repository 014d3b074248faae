"""Read and rewrite ONNX graphs: shapes, views, operators, attention, costs, and the canonical form."""

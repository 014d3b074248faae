"""Forms: the exactly equal ways to write a network, as rewrites of its ONNX graph, and the search for the fastest."""

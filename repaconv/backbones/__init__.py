"""Network families: their training-time and inference-time architectures, tensor names, folding and costs."""

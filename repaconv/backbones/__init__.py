"""Network families: training-time and inference-time architectures, how their tensors are read, what they cost."""

"""Folding a live `nn.Module` by tracing it."""

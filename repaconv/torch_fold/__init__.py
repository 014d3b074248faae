"""Fold an `nn.Module` in memory by tracing it; the result is an `nn.Module` with fewer layers."""

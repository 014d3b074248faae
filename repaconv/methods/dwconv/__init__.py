"""Accelerating Vision Transformers with Drop-in Depthwise Convolution: attention heads that are convolutions."""

from repaconv.methods.dwconv.paper import METHOD as METHOD

"""Rethinking ViT Depth (arXiv 2511.19718): blocks of parallel branches that join into one."""

from repaconv.methods.nondeep.paper import METHOD as METHOD

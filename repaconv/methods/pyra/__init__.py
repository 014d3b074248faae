"""PYRA (ECCV 2024, arXiv 2403.09192): token merging, modulated by what was learnt with LoRA."""

from repaconv.methods.pyra.paper import METHOD as METHOD

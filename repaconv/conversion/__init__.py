"""Lossy conversion of attention to convolutions and token merging, and fine-tuning."""

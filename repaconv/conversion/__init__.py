"""Lossy conversion of trained vision transformers (attention to convolution, token merging), and fine-tuning."""

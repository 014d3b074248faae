"""Fine-tuning of converted networks and of untrained training-time architectures."""

"""Fine-tuning of converted networks, and training of networks in a method's training-time architecture."""

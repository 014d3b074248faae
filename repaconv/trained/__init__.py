"""What a trained network is to every method, and what it may carry: settings, preprocessing, positions, adapters."""

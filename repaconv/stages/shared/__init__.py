"""What several stages need: a run's exports, input selection, engine files, targets."""

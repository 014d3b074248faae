"""What several stages share: option definitions, a run's exports, input selection, engine files, targets."""

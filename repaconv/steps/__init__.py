"""What the stages are made of: a run's exports, the links run, inputs chosen, contenders timed."""

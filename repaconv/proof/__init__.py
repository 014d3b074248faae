"""Whether two forms compute the same: inputs, runners, metrics and tolerances."""

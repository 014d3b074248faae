"""Whether two forms compute the same, and where they part: inputs, runners, metrics, policy, traces."""

"""Whether two models compute the same: inputs, float64 evaluation, comparison, tolerances."""

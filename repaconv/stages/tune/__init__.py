"""`tune`: the search for the fastest configuration on a target."""

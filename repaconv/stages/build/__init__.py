"""`build`: build an engine for a target."""

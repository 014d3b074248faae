"""One paper a file: how its training form becomes its deploy form."""

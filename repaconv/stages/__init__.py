"""The work of every command; only this package knows their order."""

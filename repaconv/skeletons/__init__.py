"""Families of networks around the papers' blocks: how their training form is read, built and folded."""

"""Artefacts of a run to one page: for people (HTML), for a pull request (markdown)."""

"""The stages, one file each, and the only place that knows their order. Rooms meet here.

Every stage returns its artefact and says nothing; ``progress`` is told how far a long one is.
"""

"""Forms: the exactly equal ways to write a network, as rewrites of its ONNX graph, and the search for the fastest.

A file has the rewrites of one subject, each a registered `Rewrite`; `choice` finds them by name, `search` composes
them. What finds the places where they apply is in `graphs/`.
"""

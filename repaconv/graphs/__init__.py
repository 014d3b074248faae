"""Seeing an ONNX graph: what its values are and hold, what its operators do, how it writes what networks are made of.

- `graph`: constants in float64, who makes and who reads a value, nodes written in place of others; `contract`: what a
  rewrite is, which `forms/` and `folds/` are made of.
- `shapes`: the sizes of a value, also of all that a graph computes of shapes.
- `operators`: what operators do, by name; `axes`: which axis of an input an axis of the output is.
- `selections`: which places one Slice, Gather or Split takes, and the axes that a node names; `views`: which numbers of
  another tensor a value holds, behind any number of such nodes; `chains`: those nodes, up to what computes or reads it.
- `linears`, `heads`, `attention`, `grids`: what networks are made of, however the graph writes it.
- `uniform`: values that are constant but for free sizes; `activations`: those of several nodes as one.
- `normal`: one way to write what exporters write in many; `costs`: parameters and multiply-accumulates.
"""

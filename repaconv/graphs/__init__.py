"""Seeing an ONNX graph: what its values are and hold, what its operators do, how it writes what networks are made of.

- `graph`: constants in float64, who makes and who reads a value, nodes written in place of others; `contract`: what a
  rewrite is, which `forms/` and `folds/` are made of.
- `shapes`: the one language of sizes. `inference` finds the shapes of a whole graph, `integers` what it computes of
  shapes itself, and `settling` makes constants of what has but one value.
- `operators`: what operators do, by name; `axes`: which axis of an input an axis of the output is.
- `views`: the one way to say which numbers of another tensor a value holds. `selections` reads one node that takes
  some, `chains` the nodes in a row between a value and what computes or reads it, and makes a view of them. `turns`
  writes the Transposes that products do as they read.
- `channels`: one number a channel; `linears`, `attention`, `heads` (the linear layers around it), `grids`: what
  networks are made of, however the graph writes it. `uniform`: values that are constant but for free sizes;
  `activations`: those of several nodes as one.
- `normal`: one way to write what exporters write in many; `costs`: parameters and multiply-accumulates.
"""

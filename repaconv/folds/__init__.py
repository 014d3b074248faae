"""Folds: what makes a graph of any origin smaller; `fold` has the rewrites in their order.

- `affine_maps`: what is linear over channels, as `vertices` of a `linear` graph with `maps` for edges, read off by
  `edges` and written back by `emit`; before it `moves`, `means` and `norms` bring together what belongs together.
- `convolutions`: beside any kernel, `parallel` and `sequences` of `kernels`, and their `borders`. `branches`: stacked
  ones taken apart.
- `joins`, `cheapest`: attention of branches. `finish`, `splits`: what was taken apart to be seen, together again.
- `tokens`, `pieces`: only the tokens that are read. It is a registered rewrite as well: a form names it as it names any
  other, so that `forms/` need not know this room.
- `standing`: what a fold leaves, and why.
"""

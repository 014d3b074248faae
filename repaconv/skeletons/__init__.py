"""Families of networks around the papers' blocks: how their training form is read, built and folded.

A vision transformer is read by `names`, `norms`, `blocks` and `frame` (all but its blocks), and folded by `folding` and
`ends`; `blockwise` is all of that for a method with blocks of its own. Networks of any family around their FFNs are
what `around` says: `vit`, `swin`, `metaformer`, `mixer`.
"""

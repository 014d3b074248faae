"""Attention to depthwise convolution for networks that were never trained for it: lossy, from images, never a fold.

Data flows: a plain vision transformer read as the layout dwconv-v1 (`plain.py`) and images parted by their content
(`parting.py`), whose way through it is computed once (`streams.py`). `scoring.py` says how near each head is to a
convolution (`patterns.py`), `choosing.py` which blocks to take, `heads.py` which single heads. `sequence.py` converts
these one behind the other (`fitting.py`, by least squares, `normal.py`), so that each fit sees what the ones before it
did. `judging.py` holds the result against the original on images that nothing was chosen or fitted on.
"""

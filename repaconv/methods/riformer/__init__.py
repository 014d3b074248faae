"""RIFormer (CVPR 2023, arXiv 2304.05659): a MetaFormer trained with an affine in place of the token mixer."""

from repaconv.methods.riformer.paper import METHOD as METHOD

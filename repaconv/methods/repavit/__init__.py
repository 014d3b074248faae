"""RePaViT (arXiv 2505.21847): a vision transformer whose FFN leaves some of its channels without activation."""

from repaconv.methods.repavit.paper import METHOD as METHOD

"""RepVGG (CVPR 2021, arXiv 2101.03697) and MobileOne (CVPR 2023, arXiv 2206.04040): branches into one."""

from repaconv.methods.repconv.paper import METHOD as METHOD

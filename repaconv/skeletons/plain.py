"""For a while: the names that stood here, now in the files beside this one."""

from repaconv.skeletons.blocks import BlockTraits as BlockTraits
from repaconv.skeletons.blocks import PlainAttention as PlainAttention
from repaconv.skeletons.blocks import PlainBlock as PlainBlock
from repaconv.skeletons.blocks import PlainMlp as PlainMlp
from repaconv.skeletons.blocks import scale_affine as scale_affine
from repaconv.skeletons.ends import fold_stem as fold_stem
from repaconv.skeletons.ends import fold_tail as fold_tail
from repaconv.skeletons.folding import fold_attention as fold_attention
from repaconv.skeletons.folding import fold_mlp as fold_mlp
from repaconv.skeletons.folding import folded_block as folded_block
from repaconv.skeletons.folding import linear_of as linear_of
from repaconv.skeletons.folding import named as named
from repaconv.skeletons.frame import read_frame
from repaconv.skeletons.frame import read_heads as read_heads
from repaconv.skeletons.names import block_tensors as block_tensors
from repaconv.skeletons.names import depth_of as depth_of
from repaconv.skeletons.names import in_float64 as in_float64
from repaconv.skeletons.names import official_names as official_names
from repaconv.skeletons.names import weight_of as weight_of
from repaconv.skeletons.norms import Norms as Norms
from repaconv.skeletons.norms import NormTraits as NormTraits
from repaconv.skeletons.norms import read_norms as read_norms

read_skeleton = read_frame

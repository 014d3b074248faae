"""What every method must do, and the fold against the paper's own words."""

import torch
import torch.nn.functional as F
from repaconv_dirac.checkpoint import fold_block
from repaconv_dirac.network import DiracBlock

from repaconv.testing import check_method


def test_conformance(tmp_path):
    """Recognized, folded exactly, exported, verified; damaged checkpoints are refused."""
    check_method("dirac", "tiny", tmp_path)


def test_the_fold_is_a_shortcut_and_a_normalized_convolution():
    """Written without the kernel: alpha * x + beta * conv(x, W / |W|), and then the BatchNorm."""
    torch.manual_seed(0)
    block = DiracBlock(4).double().eval()
    for tensor in block.state_dict().values():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5)
    x, w = torch.randn(2, 4, 5, 5, dtype=torch.float64), block.conv.weight
    normalized = torch.stack([filter / filter.square().sum().sqrt() for filter in w])
    alpha, beta = block.conv.alpha.view(-1, 1, 1), block.conv.beta.view(-1, 1, 1)
    expected = block.bn(alpha * x + beta * F.conv2d(x, normalized, padding=1))
    folded = fold_block(block.state_dict())
    assert torch.allclose(F.conv2d(x, folded["weight"], folded["bias"], padding=1), expected, rtol=0, atol=1e-13)

"""Laws of the algebra of affine maps, on random shapes from width 0 up, to 1e-12 relative in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from repaconv.algebra.affine_maps import Affine

WIDTHS = st.integers(0, 5)


@st.composite
def maps(draw, out=None, into=None):
    """A random map; square ones are sometimes diagonal."""
    out = draw(WIDTHS) if out is None else out
    into = draw(WIDTHS) if into is None else into
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    diagonal = out == into and draw(st.booleans())
    shape = (out,) if diagonal else (out, into)
    return Affine(
        torch.randn(shape, generator=random, dtype=torch.float64),
        torch.randn(out, generator=random, dtype=torch.float64),
    )


def inputs(width: int) -> torch.Tensor:
    return torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype == torch.float64
    if a.numel():
        assert float((a - b).abs().max()) <= 1e-12 * max(1.0, float(b.abs().max()))


def same_map(f: Affine, g: Affine) -> None:
    same(f.dense().weight, g.dense().weight)
    same(f.bias, g.bias)


@given(st.data())
def test_composing_is_applying_twice(data):
    f = data.draw(maps())
    g = data.draw(maps(into=f.out_width))
    same((g @ f)(inputs(f.in_width)), g(f(inputs(f.in_width))))


@given(st.data())
def test_composition_is_associative(data):
    f = data.draw(maps())
    g = data.draw(maps(into=f.out_width))
    h = data.draw(maps(into=g.out_width))
    same_map((h @ g) @ f, h @ (g @ f))


@given(st.data())
def test_adding_is_summing_and_commutes(data):
    f = data.draw(maps())
    g = data.draw(maps(out=f.out_width, into=f.in_width))
    x = inputs(f.in_width)
    same((f + g)(x), f(x) + g(x))
    same_map(f + g, g + f)
    same((f - g)(x), f(x) - g(x))


@given(st.data())
def test_composition_distributes_over_a_sum_inside(data):
    f = data.draw(maps())
    g = data.draw(maps(out=f.out_width, into=f.in_width))
    h = data.draw(maps(into=f.out_width))
    constant = Affine(torch.zeros_like(h.dense().weight @ f.dense().weight), h.bias)
    same_map(h @ (f + g), (h @ f) + (h @ g) - constant)


@given(st.data())
def test_identity(data):
    f = data.draw(maps())
    same_map(Affine.eye(f.out_width) @ f, f)
    same_map(f @ Affine.eye(f.in_width), f)


@given(st.data())
def test_splitting(data):
    f = data.draw(maps())
    k_out, k_in = data.draw(st.integers(0, f.out_width)), data.draw(st.integers(0, f.in_width))
    x = inputs(f.in_width)
    first, second = f.split_out(k_out)
    same(torch.cat([first(x), second(x)], -1), f(x))
    first, second = f.split_in(k_in)
    same(first(x[..., :k_in]) + second(x[..., k_in:]), f(x))
    order = torch.randperm(f.out_width, generator=torch.Generator().manual_seed(0))
    same(f.rows(order)(x), f(x)[..., order])


@given(st.integers(1, 5), st.integers(1, 5))
def test_sources(into, out):
    torch.manual_seed(into * 10 + out)
    x = torch.randn(2, into, 3, 4, dtype=torch.float64)
    last = x.movedim(1, -1)
    weight, bias = torch.randn(out, into, 1, 1).double(), torch.randn(out).double()
    same(Affine.conv1x1(weight, bias)(last).movedim(-1, 1), F.conv2d(x, weight, bias))
    same(Affine.linear(weight[:, :, 0, 0], bias)(last), F.linear(last, weight[:, :, 0, 0], bias))
    s, t = torch.randn(into, 1, 1, 1).double(), torch.randn(into).double()
    same(Affine.depthwise1x1(s, t)(last).movedim(-1, 1), F.conv2d(x, s, t, groups=into))
    mean, variance, gamma = torch.randn(into).double(), torch.rand(into).double(), torch.randn(into).double()
    same(
        Affine.batchnorm(gamma, t, mean, variance, 1e-5)(last).movedim(-1, 1),
        F.batch_norm(x, mean, variance, gamma, t, eps=1e-5),
    )


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match="cannot compose"):
        Affine.eye(2) @ Affine.eye(3)
    with pytest.raises(ValueError, match="cannot add"):
        Affine.eye(2) + Affine.eye(3)
    with pytest.raises(ValueError, match="no affine map"):
        Affine(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="1x1"):
        Affine.conv1x1(torch.ones(2, 3, 3, 3))
    with pytest.raises(ValueError, match="variance"):
        Affine.batchnorm(torch.ones(1), torch.ones(1), torch.ones(1), -torch.ones(1), 1e-5)

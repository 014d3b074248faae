"""Heads one by one: which are nearest to a convolution. The others of their block attend on."""

from __future__ import annotations

import torch

from repaconv.converting.fitting import Head, How, convolution, kernels_for
from repaconv.converting.places import Place
from repaconv.converting.plain import batches
from repaconv.converting.scoring import Scores
from repaconv.converting.streams import Streams
from repaconv.progress import Progress


def by_error(streams: Streams, how: How, progress: Progress) -> tuple[Head, ...]:
    """All heads, the cheapest to replace first: by what the best kernel alone leaves out of the residual stream."""
    plain, errors = streams.plain, dict[Head, float]()
    with torch.inference_mode():
        for index in range(len(plain.blocks)):
            progress("measure heads", index, len(plain.blocks))
            into, mixed = streams.at(index)
            place = Place(plain, index, into, mixed, into)
            found = kernels_for(place, place.values, how, (some for (some,) in batches(mixed)))
            fit = convolution(place, place.values, found.kernels, found.mean)
            outputs = place.proj[:-1].view(plain.heads, -1, plain.config.width)  # W^O of each head, [h, dh, d]
            lost = torch.zeros(plain.heads, dtype=torch.float64)
            for x, right in batches(into, mixed):
                apart = (right - fit(x) - found.bias).view(*x.shape[:2], plain.heads, -1)
                lost += torch.einsum("bnhc,hcd->hbnd", apart, outputs).double().square().sum((1, 2, 3))
            share = lost / place.middle.double().square().sum()
            errors |= {(index, head): float(error) for head, error in enumerate(share)}
    return tuple(sorted(errors, key=errors.__getitem__))


def by_sigma(scores: Scores) -> tuple[Head, ...]:
    """All heads by the paper's Sigma_h, the smallest first."""
    sigmas = {(block.block, n): head.sigma for block in scores.blocks for n, head in enumerate(block.heads)}
    return tuple(sorted(sigmas, key=sigmas.__getitem__))

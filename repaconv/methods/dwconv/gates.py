"""Gates that choose between attention and convolution: which heads the p largest of them turned (eq. 18)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from repaconv.artefacts import Fact
from repaconv.errors import Refused
from repaconv.trained.knobs import Knobs, natural, one_of, said_in


def read_gates(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], knobs: Knobs, depth: int, heads: int
) -> list[tuple[bool, ...] | None]:
    """Which heads each block's gates turn into convolutions; None for every block without gates.

    Raises:
        Refused: If the gates are soft, tie at the p-th, or stand alone without p and mode, or these without them.
    """
    said, gate = said_in(meta, "gate"), tensors.get("gate.weight")
    if gate is None:
        if said:
            raise Refused(
                "the metadata mentions gates, but there is no gate.weight.",
                hint="The file contains only a part of the network.",
                code="checkpoint.missing-keys",
            )
        return [None] * depth
    if tuple(gate.shape) not in ((depth,), (depth, heads)):
        raise Refused(
            f"gate.weight has shape {list(gate.shape)}; expected one gate per block, [{depth}], or per head, "
            f"[{depth}, {heads}].",
            hint="The file mixes two networks, or the number of heads differs (--set num_heads=N).",
            code="checkpoint.shape",
        )
    why = "the metadata lacks {}, and the gates do not show it"
    modes, how = one_of("hard-topk", "soft"), why.format("how the gates choose")
    mode = knobs.need("gate_mode", modes, "hard-topk", how, said.get("mode"), "meta.gate")
    if mode != "hard-topk":
        raise Refused(
            f"the gates are {mode}: attention and convolution both contribute, so neither can be removed.",
            hint="Finish the training with hard gates (hard-topk).",
            code="dwconv.soft-gates",
        )
    p = knobs.need("gate_p", natural, "12", why.format("how many take the convolution"), said.get("p"), "meta.gate")
    if not isinstance(p, int) or isinstance(p, bool) or not 0 <= p <= gate.numel():
        raise Refused(
            f"meta.gate.p is {p!r}, but there are {gate.numel()} gates.",
            hint="p is the number of gates that select the convolution.",
            code="dwconv.gates",
        )
    unit = "block" if gate.ndim == 1 else "head"
    chosen = _largest(gate, p)
    knobs.facts.append(Fact(name="gates", value=f"the {p} largest of {gate.numel()}, by {unit}", source="gate.weight"))
    return [tuple(row) for row in chosen.view(depth, -1).expand(depth, heads).tolist()]


def _largest(gate: Tensor, p: int) -> Tensor:
    """Which gates are among the p largest, in one row."""
    ranked = gate.double().flatten().sort(descending=True)
    if 0 < p < gate.numel() and ranked.values[p - 1] == ranked.values[p]:
        raise Refused(
            f"gate {p} and the next one in rank have equal weights ({float(ranked.values[p]):g}), so the choice "
            "between them is undefined.",
            hint="Continue the training until they differ.",
            code="dwconv.tie",
        )
    chosen = torch.zeros(gate.numel(), dtype=torch.bool)
    chosen[ranked.indices[:p]] = True
    return chosen

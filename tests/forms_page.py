"""docs/forms.md, as it follows from the rewrites that are registered: python tests/forms_page.py writes it."""

from __future__ import annotations

from pathlib import Path

from repaconv import registry
from repaconv.graphs.contract import Rewrite
from repaconv.steps.common import load_target

PAGE = Path(__file__).resolve().parents[1] / "docs" / "forms.md"
HEAD = """# Forms

A form is a set of rewrites of the exported graph, each of which changes nothing but rounding. Every one is proved
alone and in 200 random compositions, in float64 to 1e-11 (`tests/test_forms.py`), and a form is a link of every
export's chain of proof. They are applied in the order of this table, each wherever it is valid; elsewhere it leaves
the graph alone. `repaconv tune` finds out which of them pay for a network on a target; a package of somebody else adds
its own through the entry-point group `repaconv.rewrites`.

| rewrite | exact where it finds | opset |
|---|---|---|
"""
NOTE = """
\\* in the default form of x86-64; \\*\\* in that of a family of its processors, which has blocks of that size;
\\*\\*\\* in that of x86-64-openvino with AVX512-BF16.
"""
TAIL = """
## What pays on x86-64 with ONNX Runtime

float32, one thread, batch 1, times as fast as the exported graph without it, process time on an AMD EPYC with AVX-512
(`make bench-hand` has the whole against what is made by hand):

- `read-tokens`: 1.05 to 1.12 where a class token is read; the last block then computes one row.
- `attention-op`: 1.02 to 1.06, by the transposes that it saves; more the narrower the heads.
- `linear-each` on top of it: 1.01 to 1.03, up to 1.08 at batch 8: three products need no copy to be split.
- `linear-as-gemm` with `rows-throughout`: 1.01 to 1.02; the bias is added inside the product.
- `no-key-bias` and `value-bias-forward`: up to 1.02; `rms-norm`: up to 1.02; `bias-forward` with `accumulate`: 1.01.
- `mean-as-pool`: 1.00 to 1.04 on convolutional networks, the more squeeze-and-excitation they have.
- `whole-blocks`, `whole-groups`, `gate-as-image` and `conv-each` keep an image's channels in the blocks in which ONNX
  Runtime computes convolutions: of 8 with AVX2 alone, of 16 with AVX-512, for which `whole-blocks-16` and
  `whole-groups-16` fill them. On layers whose channels no 4 divides, as those that pruning leaves, 1.04 to 3.2 with
  AVX2 and 1.03 to 2.9 with AVX-512, where groups of 2 to 8 channels are 1.1 to 1.4 times as fast
  (`benchmarks/results/odd_channels.json`); 1.3 on RexNet ([the zoo](zoo.md)), up to 1.10 with squeeze-and-excitation,
  1.02 where a CSP network splits.
- What does not pay here: `scores-as-matrix` and `values-as-matrix` with 12 heads (0.55; the paper's own form),
  `pointwise-as-matmul` (0.85 on RIFormer), `group-norm-flat` (0.97), `concat-linear`, `patch-gemm`, `one-linear` and
  `gather-as-matmul` (all 1.00 within 0.02).

Together they are this target's default form: 1.15 times RePaViT-Tiny's exported graph, 1.25 that of nondeep with six
layers. Targets but those of x86-64 have none of their own but `read-tokens` on arm64: nothing was measured there.

## What pays on OpenVINO

The same, by OpenVINO's own clocks on an AMD EPYC of Zen 5; int8 with bfloat16 for the rest (`make bench-family` has the
whole form against the one of other processors):

- `turn-in-product`: 1.02 in float32, 1.07 in int8 on RePaViT-Base. A Transpose that takes heads apart and turns keys as
  well writes one number at a time (0.11 ms a block in bfloat16); heads apart keeps rows together (0.007 ms), and the
  product turns the rest as it reads. Attention's own operator does the first: it is not in this form.
- `norm-in-place`: 1.03 in float32, 1.18 in int8 on RIFormer-S12. The formula of a norm over all of an image is one
  operator there, with channels last as convolutions have them; as a row of numbers every norm takes two moves.
- `best-down-columns`: 1.02 on PYRA in int8. An ArgMax along rows takes 0.066 ms in bfloat16, one down columns 0.001.
- `rows-by-gathernd`: 1.15 on PYRA in int8. `patch-gemm`: 1.01 in int8. `column-as-sum`: 1.00 to 1.01.
- About zero (`--quantiser onnxruntime-symmetric`), int8 is 1.01 to 1.13 times as fast as with zero points.
"""


def page() -> str:
    """The whole page."""
    rewrites: list[Rewrite] = [
        registry.load(registry.REWRITES, name) for name in registry.registered(registry.REWRITES)
    ]
    target = load_target("x86-64")
    everywhere = dict.fromkeys(target.form(""), " *")
    somewhere = {name: " **" for form, names in target.forms.items() if form.startswith("default@") for name in names}
    beside = load_target("x86-64-openvino").forms["default@avx512-bf16"]
    marks = {**dict.fromkeys(beside, " ***"), **somewhere, **everywhere}
    rows = [
        f"| `{each.name}`{marks.get(each.name, '')} | {each.valid} | {each.opset or ''} |\n"
        for each in sorted(rewrites, key=lambda each: (each.order, each.name))
    ]
    return HEAD + "".join(rows) + NOTE + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())

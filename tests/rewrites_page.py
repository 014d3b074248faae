"""Generates docs/rewrites.md from the registered rewrites: `python tests/rewrites_page.py`."""

from __future__ import annotations

from pathlib import Path

from repaconv.core import plugins
from repaconv.graph.rewrite_contract import Rewrite
from repaconv.stages.shared.target_lookup import load_target

PAGE = Path(__file__).resolve().parents[1] / "docs" / "rewrites.md"
HEAD = """# Rewrites

```console
$ repaconv export --preset default
$ repaconv tune ckpt.pth
```

A rewrite changes how an ONNX graph is written, not what it computes. A rewrite preset (`--preset`) is a set of
rewrites; each target has a default one. They are applied in the order of this table, wherever they are valid. Each
rewrite is tested alone and in 200 random combinations, in float64 to 1e-11 (`tests/test_speed_rewrites.py`), and every
export with a preset is verified in the link `form`. `repaconv tune` finds out which ones are faster for your network. A
package of yours adds [its own](how-to/own-rewrite.md).

| Rewrite | Applies to | From opset |
|---|---|---|
"""
NOTE = """
\\* in the default preset of x86-64; \\*\\* in that of a CPU level with blocks of that size; \\*\\*\\* in that of
x86-64-openvino with AVX512-BF16 (`concat-parts`: with every CPU; `silu-as-quotient`: with AMX).
"""
TAIL = """
## What is faster on x86-64 with ONNX Runtime

Speedup over the exported graph without the rewrite: FP32, one thread, batch size 1, CPU time on an AMD EPYC with
AVX-512.

| Rewrite | Speedup | Why, or where |
|---|---|---|
| `read-tokens` | 1.05 to 1.12 | where a class token is read: the last block computes one row |
| `attention-op` | 1.02 to 1.06 | saves transposes; more with narrower heads |
| `rotary-op` | 1.25 on EVA02-Tiny, 1.12 on DINOv3-Tiny | one pass over queries and keys, not seven; Xeon with AMX |
| `linear-each` after them | 1.01 to 1.03; 1.08 at batch size 8 | three products need no copy to be split |
| `linear-as-gemm` with `rows-throughout` | 1.01 to 1.02 | the bias is added inside the product |
| `no-key-bias`, `value-bias-forward` | up to 1.02 | |
| `rms-norm` | up to 1.02 | |
| `bias-forward` with `accumulate` | 1.01 | |
| `mean-as-pool` | 1.00 to 1.04 | convolutional networks, more with squeeze-and-excitation |
| `mish-as-quotient` | AVX2 1.2 to 2.3, AVX-512 1.4 to 4.5 | six 3x3 convolutions with a Mish each |
| the same | 2.4 to 4.5, 3.9 to 7.8 | three depthwise and three 1x1 convolutions with a Mish each |
| `prelu-as-sum` | AVX2 1.07 to 1.5, AVX-512 1.07 to 1.8 | six 3x3 convolutions with a PReLU each |
| the same | 1.3 to 3.0, 1.15 to 3.7 | three depthwise and three 1x1 convolutions with a PReLU each |
| `softmax-as-quotient` | 1.04 on YOLOv8n and YOLO11n | box distributions, classes of pixels; AVX2 |
| `lrn-as-conv` | AVX2 1.35 to 6.3, AVX-512 1.7 to 9.4 | six convolutions with an LRN each: AlexNet, GoogLeNet, ZFNet |
| `resize-as-matmul` | AVX2 7.4 to 21, AVX-512 9.6 to 42 | two convolutions with a bicubic `nn.Upsample` each |
| `transpose-in-steps` | 1.00 (RT-DETR) to 1.10 (HAT) | windows of images, pixel shuffles; MaxViT 1.08; AVX2 |
| `winograd`, by `tune` | 1.04 to 1.4; a chain of convolutions up to 1.9 | 3x3 convolutions, 48 channels or more |
| `whole-blocks`, `whole-groups`, `gate-as-image`, `conv-each` | 1.04 to 3.2; AVX-512: 1.03 to 2.9 | odd channels |
| the same | 1.3; up to 1.10; 1.02 | RexNet ([zoo](zoo.md)); squeeze-and-excitation; CSP networks |
| groups of 2 to 8 channels | 1.1 to 1.4 | `benchmarks/results/channel_padding.json` |

*Odd channels* are no multiple of 4, as after pruning. ONNX Runtime computes convolutions in blocks of channels: 8 with
AVX2, 16 with AVX-512 (`whole-blocks-16`, `whole-groups-16`).

`winograd` writes weights of 16/9 the size, and about 80 nodes for a convolution, where an estimate promises a speedup
of at least 1.15. It is fitted to measurements with AVX2 and one thread, and holds within 0.35 with AVX-512 (Zen 5). On
two threads ONNX Runtime divides each of these nodes: a U-Net has 0.73 of its speed, RepVGG-A0 0.95. So no default
preset has `winograd`, and `tune` tries it with your number of threads, in FP32. It needs a known image size:
`tune --image-size N` if it is dynamic. Nothing was measured with AMX. It rounds about as the plain convolution does,
and less than OpenVINO's.

Not faster here: `scores-as-matrix` with 12 heads (0.55; the paper's own), `concat-linear` and `patch-gemm` (1.00 within
0.02). 15 rewrites of earlier versions were removed, because they were faster in no benchmark: among them
`pointwise-as-matmul` (0.85 on RIFormer) and `group-norm-flat` (0.97). A tuned file that names one is refused with the
rewrite to use in its place.

Together, the default preset of this target gives 1.15x on RePaViT-Tiny and 1.25x on nondeep with six layers. arm64 has
`read-tokens`, with `rows-by-gathernd` for PYRA; `cuda-ort` has presets for RePaViT and NonDeep. Targets without a
preset were not measured.

## What is faster on OpenVINO

By OpenVINO's own clocks on an AMD EPYC (Zen 5); INT8 with BF16 for the remaining layers (`make bench-presets`,
those of layouts `make bench-rewrite`).

| Rewrite | Speedup | Why |
|---|---|---|
| `turn-in-product` | 1.02 in FP32, 1.07 in INT8 (RePaViT-Base) | Transpose keeps rows together: 0.007 ms, not 0.11 |
| `channels-last-as-tokens` | FP32 1.10, BF16 1.19 on ConvNeXt-T; 1.87, 1.35 on MambaOut | they are last in memory |
| the same | FP32 1.22, 1.45 and 1.51 on CAFormer-S18, EdgeNeXt-S and MaxViT-Pico; 1.00 on Swin-T | |
| `output-by-transpose` | FP32 1.09, BF16 1.17 on a U-Net of ResNet-18 | its output has 21 channels |
| `resized-output-by-transpose` | FP32 1.27 on DeepLabV3+ of MobileNetV2; not in BF16 | the same |
| `norm-in-place` | 1.03 in FP32, 1.18 in INT8 (RIFormer-S12) | one operator with channels last, without two moves |
| `best-down-columns` | 1.02 in INT8 (PYRA) | ArgMax: 0.066 ms along rows in BF16, 0.001 ms down columns |
| `rows-by-gathernd` | 1.15 in INT8 (PYRA) | |
| `patch-gemm` | 1.01 in INT8 | |
| `column-as-sum` | 1.00 to 1.01 | |
| `winograd`, by `tune` | 1.02 to 1.4 in FP32 | 3x3 convolutions; AVX2 |
| `concat-parts` | 1.09 (1.08 to 1.10) on YOLOv9t | no Split is copied; FP32, Xeon with AMX |
| the same, `linear-each` | 1.13 (1.12 to 1.15) on YOLO12n | the same CPU |
| `linear-each` | 1.03 (1.01 to 1.04) on EfficientViT-M2 | queries, keys and values by 1x1 convolutions; the same CPU |
| `silu-as-quotient` | FP32 1.02, BF16 1.15, INT8 1.65 on YOLOv8n | no convolution computes SiLU; Xeon with AMX |
| the same | 1.03, 1.33, 1.48 on YOLO11n; 1.01, 1.13, 1.00 on EfficientNet-B0 | the same CPU |
| the same | FP32 1.04, 1.05 and 1.06, BF16 1.05, 1.04 and 1.00, on the same three | AVX-512 (Zen 5) |
| the same, with a dynamic batch size | 0.87 to 0.89 in FP32 | hence `static-silu-as-quotient`; AVX-512 (Zen 5) |
| `rotary-op` | FP32 1.33, BF16 1.56 on EVA02-Tiny; 1.03, 1.04 on DINOv3-Tiny | Xeon with AMX |
| symmetric INT8 (`--quantizer onnxruntime-symmetric`) | 1.04, from 0.91 to 1.22 | 27 networks; AVX-512 (Zen 5) |

Not faster here, on a Xeon with AMX: `attention-op` (DeiT-Tiny 0.96 in BF16, 0.99 in FP32), and `conv-each` in FP32 on
Res2Net-50 (0.94, 0.92 to 0.97) and CS3Darknet-S (1.00, 0.99 to 1.01).
"""


def page() -> str:
    """The whole page."""
    rewrites: list[Rewrite] = [plugins.load(plugins.REWRITES, name) for name in plugins.registered(plugins.REWRITES)]
    target = load_target("x86-64")
    everywhere = dict.fromkeys(target.form(""), " *")
    somewhere = {name: " **" for form, names in target.forms.items() if form.startswith("default@") for name in names}
    openvino = load_target("x86-64-openvino").forms
    beside = (*openvino["default@avx512-bf16"], *openvino["default@amx"])
    marks = {**dict.fromkeys(beside, " ***"), **somewhere, **everywhere}
    rows = [
        f"| `{each.name}`{marks.get(each.name, '')} | {each.valid} | {each.opset or ''} |\n"
        for each in sorted(rewrites, key=lambda each: (each.order, each.name))
    ]
    return HEAD + "".join(rows) + NOTE + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())

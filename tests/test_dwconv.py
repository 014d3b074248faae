"""dwconv: every mixer of the layout against NumPy loops, gates, separation, positions, official files, refusals."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from conftest import SHARED
from numpy_reference_networks import gelu

import repaconv as rc
from repaconv.backbones.vit_checkpoint_reader import resample
from repaconv.core.errors import GateFailed, Refused
from repaconv.methods.dwconv import METHOD
from repaconv.methods.dwconv import paper_equations as dwconv
from repaconv.methods.dwconv.paper_equations import nearest_separable, separable_factors

WIDTH, HEADS, HEAD, GRID = 12, 3, 4, (4, 5)
IMAGES = np.random.default_rng(4).standard_normal((2, 3, 8, 10), dtype=np.float32)


def arch(**more):
    return {"format": "dwconv-v1", "arch": {"img_size": [8, 10], "num_heads": HEADS, "norm_eps": 1e-6, **more}}


def rand(*shape):
    return torch.randn(*shape) / sqrt(shape[-1] if len(shape) == 2 else 3)


def linear(name, out, width=WIDTH):
    return {f"{name}.weight": rand(out, width), f"{name}.bias": 0.3 * torch.randn(out)}


MIXERS = {
    "attention": lambda: linear("qkv", 36),
    "depthwise": lambda: {**linear("v", 12), "dw.weight": rand(12, 1, 3, 3), "dw.bias": torch.randn(12)},
    "shared": lambda: {**linear("v", 12), "dw.weight": rand(3, 1, 5, 5)},
    "ensembled": lambda: {
        **linear("v", 12), "dw.weight": rand(4, 1, 3, 3), "dw.bias": torch.randn(4), "gamma": torch.randn(3)
    },
    "full": lambda: {"conv.weight": rand(12, 12, 3, 3), "conv.bias": torch.randn(12)},
    "product": lambda: {
        "conv.weight": rand(12, 12)[:, :, None, None] * rand(12, 1, 3, 3), "conv.bias": torch.randn(12)
    },
    "scattered": lambda: {
        **linear("qkv", 36),
        "dw.weight": rand(8, 1, 3, 3),
        "dw.bias": torch.randn(8),
        "conv_heads": torch.tensor([True, False, True]),
    },
    "compact": lambda: {
        **linear("qkv", 2 * 4 + 12), "dw.weight": rand(2, 1, 3, 3), "conv_heads": torch.tensor([True, True, False])
    },
}  # fmt: skip


def make(*mixers, swiglu=False, scale=True, classes=5):
    weights = {"pos_embed": 0.3 * torch.randn(1, 20, WIDTH), "patch_embed.proj.weight": rand(WIDTH, 3, 2, 2)}
    weights["patch_embed.proj.bias"] = torch.randn(WIDTH)
    for index, mixer in enumerate(mixers):
        block = {f"attn.{name}": tensor for name, tensor in MIXERS[mixer]().items()} | linear("attn.proj", WIDTH)
        block |= linear("mlp.w12", 32) | linear("mlp.w3", WIDTH, 16) if swiglu else (
            linear("mlp.fc1", 20) | linear("mlp.fc2", WIDTH, 20)
        )  # fmt: skip
        for norm in ("norm1", "norm2"):
            block |= {f"{norm}.weight": 1 + 0.3 * torch.randn(WIDTH), f"{norm}.bias": 0.5 * torch.randn(WIDTH)}
        if scale:
            block |= {f"ls{i}.gamma": 0.5 * torch.randn(WIDTH) for i in (1, 2)}
        weights |= {f"blocks.{index}.{name}": tensor for name, tensor in block.items()}
    weights |= {"norm.weight": 1 + 0.3 * torch.randn(WIDTH), "norm.bias": torch.randn(WIDTH)}
    return weights | (linear("head", classes) if classes else {})


def save(weights, meta, path="c.pth"):
    torch.save({"model": weights, "meta": meta}, path)
    return path


# --- the layout in NumPy --------------------------------------------------------------------------------


def conv(x, kernel, bias):
    """[B, h, w, c] with kernel [c, k, k] (depthwise) or [o, c, k, k]; cross-correlation, zero padding."""
    side = kernel.shape[-1]
    pad = side // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = x.shape[1:3]
    out = 0.0
    for r in range(side):
        for s in range(side):
            part = padded[:, r : r + height, s : s + width]
            tap = kernel[..., r, s]
            out = out + (part * tap if kernel.ndim == 3 else part @ tap.T)
    return out + bias


def mix(x, w, gates):
    b = len(x)
    project = lambda name, z: z @ w[f"{name}.weight"].T + w[f"{name}.bias"]  # noqa: E731
    grid = lambda z: z.reshape(b, *GRID, -1)  # noqa: E731
    if "conv.weight" in w:
        y = conv(grid(x), w["conv.weight"], w["conv.bias"]).reshape(b, -1, WIDTH)
        return project("proj", y)
    if "gamma" in w:
        share = np.exp(w["gamma"]) / np.exp(w["gamma"]).sum()
        v = (project("v", x).reshape(b, -1, HEADS, HEAD) * share[:, None]).sum(2)
        y = conv(grid(v), w["dw.weight"][:, 0], w["dw.bias"]).reshape(b, -1, HEAD)
        output = (w["proj.weight"].reshape(WIDTH, HEADS, HEAD) * share[:, None]).sum(1)
        return y @ output.T + w["proj.bias"]
    flags = w["conv_heads"].astype(bool) if "conv_heads" in w else gates
    flags = np.array([("v.weight" in w)] * HEADS if flags is None else flags)
    if "v.weight" in w:
        v = project("v", x)
    else:
        qkv = project("qkv", x)
        some = (qkv.shape[-1] - WIDTH) // 2
        q, k, v = qkv[..., :some], qkv[..., some : 2 * some], qkv[..., 2 * some :]
    heads, used, taken = [], 0, 0
    for h in range(HEADS):
        vh = v[..., h * HEAD : (h + 1) * HEAD]
        if flags[h]:
            kernels = w["dw.weight"][:, 0]
            bias = w.get("dw.bias", np.zeros(len(kernels)))
            rows = len(kernels)
            at = h if rows in (WIDTH, HEADS) and rows != flags.sum() * HEAD else taken
            part = slice(at * HEAD, (at + 1) * HEAD) if rows in (WIDTH, flags.sum() * HEAD) else [at] * HEAD
            heads.append(conv(grid(vh), kernels[part], bias[part]).reshape(b, -1, HEAD))
            taken += 1
        else:
            at = h if some == WIDTH else used
            qh, kh = (z[..., at * HEAD : (at + 1) * HEAD] for z in (q, k))
            scores = qh @ kh.swapaxes(1, 2) / sqrt(HEAD)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(e / e.sum(-1, keepdims=True) @ vh)
            used += 1
    return project("proj", np.concatenate(heads, -1))


def layernorm(x, w, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def net(weights, images, gates=None):
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    b, c, h, wd = images.shape
    cut = images.astype(np.float64).reshape(b, c, h // 2, 2, wd // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    x = cut.reshape(b, -1, c * 4) @ w["patch_embed.proj.weight"].reshape(WIDTH, -1).T + w["patch_embed.proj.bias"]
    x = x + w["pos_embed"]
    index = 0
    while f"blocks.{index}.norm1.weight" in w:
        block = {n.removeprefix(p): v for n, v in w.items() if n.startswith(p := f"blocks.{index}.")}
        attn = {n.removeprefix("attn."): v for n, v in block.items() if n.startswith("attn.")}
        x = x + block.get("ls1.gamma", 1.0) * mix(layernorm(x, block, "norm1"), attn, gates and gates[index])
        n = layernorm(x, block, "norm2")
        if "mlp.w12.weight" in block:
            a, g = np.split(n @ block["mlp.w12.weight"].T + block["mlp.w12.bias"], 2, -1)
            y = (a / (1 + np.exp(-a)) * g) @ block["mlp.w3.weight"].T + block["mlp.w3.bias"]
        else:
            y = gelu(n @ block["mlp.fc1.weight"].T + block["mlp.fc1.bias"]) @ block["mlp.fc2.weight"].T
            y = y + block["mlp.fc2.bias"]
        x = x + block.get("ls2.gamma", 1.0) * y
        index += 1
    x = layernorm(x, w, "norm")
    return x.mean(1) @ w["head.weight"].T + w["head.bias"] if "head.weight" in w else x


def proved(weights, meta, gates=None, limit=1e-12, **arguments):
    folded = rc.fold(save(weights, meta), force=True, **arguments)
    np.savez("r.npz", input=IMAGES, output_fp64=net(weights, IMAGES, gates))
    found = {link.name: link.metrics.max_rel_error for link in rc.verify(inputs="r.npz").links}
    assert found["recorded"] <= 1e-12
    assert max(found["fold"], *(step.max_rel_error for step in folded.certificate)) <= limit
    assert found["stored"] <= 1e-5
    return folded


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("swiglu", [False, True])
def test_every_mixer_folds(mixer, swiglu):
    torch.manual_seed(1)
    weights = make(mixer, "depthwise", swiglu=swiglu, scale=not swiglu)
    folded = proved(weights, arch())
    kinds = {"shared": "depthwise", "product": "full-convolution", "full": "full-convolution", "compact": "scattered"}
    assert folded.config["blocks"][0]["mixer"]["kind"] == kinds.get(mixer, mixer)
    assert folded.tolerances["fold"] == 1e-12


def test_gates_by_block_and_by_head():
    torch.manual_seed(2)
    weights = make("attention", "attention", "attention")
    for index in range(3):
        weights |= {f"blocks.{index}.attn.dw.weight": rand(12, 1, 3, 3), f"blocks.{index}.attn.dw.bias": rand(12)}
    weights["gate.weight"] = torch.tensor([0.1, 2.0, -1.0])
    folded = proved(
        weights, {**arch(), "gate": {"unit": "block", "p": 1, "mode": "hard-topk"}}, [[0] * 3, [1] * 3, [0] * 3]
    )
    assert [block["mixer"]["kind"] for block in folded.config["blocks"]] == ["attention", "depthwise", "attention"]
    assert not any(".0.attn.dw" in tensor.name for tensor in folded.tensors)
    weights["gate.weight"] = torch.tensor([[3.0, 0.1, 2.0], [0.0, 0.2, 0.1], [5.0, 6.0, 7.0]])
    by_head = [[1, 0, 1], [0, 0, 0], [1, 1, 1]]
    folded = proved(weights, {**arch(), "gate": {"unit": "head", "p": 5, "mode": "hard-topk"}}, by_head)
    assert [block["mixer"]["kind"] for block in folded.config["blocks"]] == ["scattered", "attention", "depthwise"]


def test_tokens_are_an_output_too():
    torch.manual_seed(3)
    weights = make("depthwise", "attention", classes=0)
    proved(weights, arch())
    exported = rc.export(batch=1)
    assert exported.verdict == "passed"
    assert {link.name: link.verdict for link in rc.verify(inputs="r.npz").links}["onnx"] == "passed"


def test_separation():
    torch.manual_seed(4)
    product = rand(7, 5)[:, :, None, None] * rand(7, 1, 3, 3)
    assert 1e-9 < nearest_separable(product)[1] <= 6e-8  # as float32 rounds
    exact, error = nearest_separable(product.double()[:, :1])
    assert error <= 1e-15
    assert torch.allclose(exact, product.double()[:, :1], rtol=1e-12)
    pointwise, kernels = separable_factors(product.double())
    assert torch.allclose(pointwise[:, :, None, None] * kernels, product.double(), rtol=1e-5, atol=1e-7)
    assert nearest_separable(product + 0.01 * rand(7, 5, 3, 3))[1] > 1e-3
    assert nearest_separable(torch.zeros(2, 5, 3, 3))[1] == 0


def test_full_convolutions_can_be_kept_or_insisted_on():
    torch.manual_seed(5)
    weights = make("product", "full")
    weights["blocks.0.attn.conv.weight"] = weights["blocks.0.attn.conv.weight"][:, :, 1:2, 1:2]  # exactly a product
    assert kinds_of(proved(weights, arch())) == ["depthwise", "full-convolution"]
    assert kinds_of(proved(weights, arch(), settings={"full_conv": "keep"})) == ["full-convolution"] * 2
    with pytest.raises(Refused) as caught:
        rc.fold("c.pth", settings={"full_conv": "refactor"})
    assert caught.value.code == "dwconv.not-separable"


def kinds_of(folded):
    return [block["mixer"]["kind"] for block in folded.config["blocks"]]


def test_a_rounded_product_has_a_tolerance_of_its_own_and_no_other_block_has(monkeypatch):
    torch.manual_seed(9)
    weights = make("product", "depthwise")
    folded = proved(weights, arch(), limit=1e-7, settings={"full_conv": "refactor"})
    assert kinds_of(folded) == ["depthwise", "depthwise"]
    rows = {step.module: step for step in folded.certificate}
    own = rows.pop("blocks.0.attn.conv")
    assert 1e-9 < own.max_rel_error <= own.allowed == 1e-7
    assert "stored in float32" in own.reason
    assert {(step.allowed, step.reason) for step in rows.values()} == {(1e-12, "")}
    # 2e-8 too much in another block is a defect still
    right = dwconv.fold_mixer

    def off(block, mixer, *rest, **more):
        done = right(block, mixer, *rest, **more)
        if mixer.kind == "depthwise":
            done.tensors["attn.proj.bias"].mul_(1 + 2e-8)
        return done

    with monkeypatch.context() as patch:  # an undo would leave the test's own folder, too
        patch.setattr(dwconv, "fold_mixer", off)
        with pytest.raises(GateFailed, match=r"blocks\.1"):
            rc.fold("c.pth", settings={"full_conv": "refactor"}, force=True)
    # between a product and none: kept by itself, not called a defect; refused where it is insisted on
    weights["blocks.0.attn.conv.weight"] += 3e-7 * rand(12, 12, 3, 3)
    assert kinds_of(rc.fold(save(weights, arch()), force=True)) == ["full-convolution", "depthwise"]
    with pytest.raises(Refused, match="is not the product of"):
        rc.fold("c.pth", settings={"full_conv": "refactor"}, force=True)


def test_dinov2_spellings_and_another_image_size():
    torch.manual_seed(6)
    weights = make("depthwise", "attention")
    chunked = {name.replace("blocks.", "blocks.0."): tensor for name, tensor in weights.items()}
    folded = proved(weights, arch())
    again = rc.fold(save({**chunked, "mask_token": torch.zeros(1, WIDTH)}, arch(), "chunked.pth"))
    assert again.payload.sha256 == folded.payload.sha256
    assert next(fact.value for fact in again.facts if fact.name == "unused") == ["mask_token"]
    larger = rc.fold(save(weights, arch()), settings={"image_size": "12x14"}, force=True)
    assert larger.image_size == (12, 14)
    assert rc.verify().verdict == "passed"
    for size, code in (("13x14", "vit.image-size"),):
        with pytest.raises(Refused) as caught:
            rc.fold("c.pth", settings={"image_size": size}, force=True)
        assert caught.value.code == code


def test_positions_are_resampled_as_the_official_code_does():
    path = SHARED / "dwconv" / "dinov2_plain.pth"
    if not path.is_file():
        pytest.skip("official checkpoints are absent")
    from repaconv.backbones.vit import ViT, ViTConfig
    from repaconv.backbones.vit_layers import MlpSpec
    from repaconv.backbones.vit_training_blocks import BlockTraits, PlainAttention, PlainBlock
    from repaconv.backbones.vit_training_norms import NormSettings
    from repaconv.method_api.fold_error import loaded

    weights = torch.load(path, weights_only=True)
    weights.pop("mask_token")
    weights["pos_embed"] = resample(weights["pos_embed"], 1, (8, 8), (10, 9), "offset")
    config = ViTConfig((140, 126), 14, 64, 0, (None,) * 4)
    traits = BlockTraits.read({n.removeprefix("blocks.0."): w for n, w in weights.items()}, NormSettings(1e-6))
    net = ViT(config, lambda config, _: PlainBlock(config, PlainAttention(64, 4), MlpSpec(256).build(64), traits))
    with np.load(path.with_suffix(".npz")) as recorded, torch.no_grad():
        output = loaded(net, weights)(torch.from_numpy(recorded["input_interp"]).double()).numpy()
        expected = recorded["output_fp64_interp"]
    # the official code resamples in float32, also in a float64 net; another way of resampling is 8% off
    assert np.abs(output - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("path", sorted((SHARED / "dwconv").glob("dwconv_*.pth")), ids=lambda path: path.stem)
def test_official_checkpoints(path):
    folded = rc.fold(path)
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    rc.export(batch=1)
    found = {link.name: link.metrics.max_rel_error for link in rc.verify(inputs=path.with_suffix(".npz")).links}
    assert found["recorded"] <= 1e-14
    assert found["fold"] <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5


@pytest.mark.parametrize("name", ["digits_vit", "dinov2_plain"])
@pytest.mark.parametrize("method", ["auto", "dwconv"])
def test_plain_nets_are_refused(name, method):
    path = SHARED / "dwconv" / f"{name}.pth"
    if not path.is_file():
        pytest.skip("official checkpoints are absent")
    with pytest.raises(Refused) as caught:
        rc.fold(path, method=method)
    assert caught.value.code == "method.mismatch"


GATE = {"unit": "block", "p": 1, "mode": "hard-topk"}


def _gated(weights, values):
    weights["gate.weight"] = torch.tensor(values)
    weights |= {f"blocks.{i}.attn.dw.weight": rand(12, 1, 3, 3) for i in (0, 1)}


@pytest.mark.parametrize(
    ("mixers", "change", "gate", "code"),
    [
        ("aa", lambda w: _gated(w, [1.0, 2.0]), {**GATE, "mode": "soft"}, "dwconv.soft-gates"),
        ("aa", lambda w: _gated(w, [2.0, 2.0]), GATE, "dwconv.tie"),
        ("aa", lambda w: _gated(w, [1.0, 2.0]), {"unit": "block", "mode": "hard-topk"}, "setting.needed"),
        ("aa", lambda w: _gated(w, [1.0, 2.0]), {**GATE, "p": 3}, "dwconv.gates"),
        ("aa", lambda w: _gated(w, [1.0, 2.0, 3.0]), GATE, "checkpoint.shape"),
        ("dd", lambda w: _gated(w, [1.0, 2.0]), GATE, "dwconv.mixer"),  # the first is to attend, and has no q and k
        ("ff", lambda w: w.update({"gate.weight": torch.tensor([1.0, 2.0])}), GATE, "dwconv.mixer"),
        ("aa", lambda w: w.update({"blocks.0.attn.dw.weight": rand(12, 1, 3, 3)}), None, "dwconv.mixer"),
        ("dd", lambda w: None, GATE, "checkpoint.missing-keys"),
        ("dd", lambda w: w.pop("blocks.0.attn.dw.weight"), None, "checkpoint.missing-keys"),
        ("dd", lambda w: w.update({"blocks.0.attn.dw.weight": rand(12, 1, 2, 2)}), None, "dwconv.mixer"),
        ("dd", lambda w: w.update({"blocks.0.attn.dw.weight": rand(5, 1, 3, 3)}), None, "dwconv.mixer"),
        ("dd", lambda w: w.update({"blocks.0.attn.head_probs": rand(3)}), None, "method.mismatch"),
        ("dd", lambda w: w.update({"cls_token": rand(1, 1, 12), "pos_embed": rand(1, 21, 12)}), None, "dwconv.tokens"),
        ("dd", lambda w: w.update({"blocks.1.attn.v.weight": torch.full((12, 12), torch.inf)}), None,
         "checkpoint.not-finite"),
        ("dd", lambda w: w.update({"blocks.1.extra": rand(2)}), None, "checkpoint.unexpected-keys"),
        ("ee", lambda w: w.pop("blocks.0.attn.gamma"), None, "dwconv.mixer"),
        ("ss", lambda w: w.pop("blocks.0.attn.conv_heads"), None, "dwconv.mixer"),
        ("ss", lambda w: w.update({"blocks.0.attn.conv_heads": torch.tensor([0.9, 0.1, 0.8])}), None,
         "dwconv.soft-gates"),
        ("ss", lambda w: w.update({"blocks.0.attn.qkv.weight": rand(30, 12)}), None, "dwconv.mixer"),
        ("ff", lambda w: w.update({"blocks.0.attn.conv.weight": rand(12, 11, 3, 3)}), None, "dwconv.mixer"),
    ],
)  # fmt: skip
def test_what_does_not_fold_is_refused(mixers, change, gate, code):
    torch.manual_seed(7)
    names = {"a": "attention", "d": "depthwise", "e": "ensembled", "s": "scattered", "f": "full"}
    weights = make(*(names[m] for m in mixers))
    change(weights)
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights, {**arch(), **({"gate": gate} if gate else {})}))
    assert caught.value.code == code


def test_the_heads_are_asked_for():
    torch.manual_seed(8)
    with pytest.raises(Refused) as caught:
        rc.fold(save(make("depthwise"), {"format": "dwconv-v1", "arch": {"img_size": [8, 10]}}))
    assert "--set num_heads=" in caught.value.hint


def test_the_examples_fold():
    rc.fold(save(METHOD.example("tiny", seed=1), {}), settings={"num_heads": "3"})
    assert rc.verify().verdict == "passed"
    rows = {(row.model, row.form): row for row in rc.table("dwconv").rows}
    assert rows["DW [all]", "training"].agrees
    assert rows["MhSA", "training"].agrees

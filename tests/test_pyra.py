"""PYRA and token merging: the official block in NumPy loops, official files, schedules, refusals."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED
from numpy_reference_networks import gelu
from test_divergence_location import graph
from torch import nn

import repaconv as rc
from repaconv.backbones.token_merging_block import Merge, MergeSpec
from repaconv.backbones.vit import BACKBONE
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.pyra import METHOD
from repaconv.methods.pyra.merging_schedules import TABLES, equation_8
from repaconv.methods.pyra.paper_equations import fold_modulation
from repaconv.onnx_export.float64_exporter import network_to_onnx
from repaconv.onnx_export.torch_exporter import operators_of, to_onnx
from repaconv.verification.model_runners import load_onnx, with_weights

IMAGES = np.random.default_rng(6).standard_normal((3, 3, 32, 32), dtype=np.float32)
SETTINGS = {"num_heads": "3"}


def save(weights, path="c.pth", **beside):
    torch.save({"model": weights, **beside}, path)
    return path


def layernorm(x, w, name, eps=1e-6):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_block(x, size, w, heads, r, protected):
    """One image, x [N, d]; size [N] or None."""
    n, width = x.shape
    normed = layernorm(x, w, "norm1")
    qkv = normed @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]
    if "attn.LoRA_a.weight" in w:
        qkv = qkv + normed @ w["attn.LoRA_a.weight"].T @ w["attn.LoRA_b.weight"].T
    q, k, v = qkv.reshape(n, 3, heads, width // heads).transpose(1, 2, 0, 3)
    scores = q @ k.swapaxes(1, 2) / sqrt(width // heads)
    if size is not None:
        scores = scores + np.log(size)
    attn = np.exp(scores - scores.max(-1, keepdims=True))
    attn /= attn.sum(-1, keepdims=True)
    mixed = (attn @ v).transpose(1, 0, 2).reshape(n, width)
    x = x + mixed @ w["attn.proj.weight"].T + w["attn.proj.bias"]
    if r:
        metric = k.mean(0)
        metric = metric / np.linalg.norm(metric, axis=-1, keepdims=True)
        even, odd = list(range(0, n, 2)), list(range(1, n, 2))
        like = metric[even] @ metric[odd].T
        like[0] = -np.inf
        if protected == 2:
            like[:, 0] = -np.inf
        best, partner = like.max(1), like.argmax(1)
        going = sorted(range(len(even)), key=lambda i: -best[i])[:r]
        size = np.ones(n) if size is None else size
        z = x * size[:, None]
        sources = np.array([z[even[i]] for i in going])
        targets = np.array([z[odd[partner[i]]] for i in going])
        if "pyra_a" in w:
            m = layernorm(sources + targets, w, "pyra_norm", 1e-5)
            by_channel, by_row = 2 * sigmoid(w["pyra_a"].T @ m), 2 * sigmoid(m @ w["pyra_b"].T) - 1
            sources = sources + sources * by_channel * by_row
        new, counts = z.copy(), size.copy()
        for s, i in zip(sources, going, strict=True):
            new[odd[partner[i]]] += s
            counts[odd[partner[i]]] += size[even[i]]
        kept = [even[i] for i in range(len(even)) if i not in going]
        order = [kept[0], odd[0], *kept[1:], *odd[1:]] if protected == 2 else kept + odd
        size = counts[order]
        x = new[order] / size[:, None]
    n2 = layernorm(x, w, "norm2")
    y = gelu(n2 @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]) @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]
    return x + y, size


def net(weights, schedule, heads=3):
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    p = w["patch_embed.proj.weight"].shape[2]
    b, c, h, wd = IMAGES.shape
    cut = (
        IMAGES.astype(np.float64)
        .reshape(b, c, h // p, p, wd // p, p)
        .transpose(0, 2, 4, 1, 3, 5)
        .reshape(b, -1, c * p * p)
    )
    x = cut @ w["patch_embed.proj.weight"].reshape(-1, c * p * p).T + w["patch_embed.proj.bias"]
    prefix = [w[name][0] for name in ("cls_token", "dist_token") if name in w]
    outputs = []
    for image in x:
        tokens, size = np.concatenate([*prefix, image]) + w["pos_embed"][0], None
        for index, r in enumerate(schedule):
            block = {n.removeprefix(q): v for n, v in w.items() if n.startswith(q := f"blocks.{index}.")}
            tokens, size = one_block(tokens, size, block, heads, r, len(prefix))
        tokens = layernorm(tokens, w, "norm")
        logits = tokens[0] @ w["head.weight"].T + w["head.bias"]
        if len(prefix) == 2:
            logits = (logits + tokens[1] @ w["head_dist.weight"].T + w["head_dist.bias"]) / 2
        outputs.append(logits)
    return np.array(outputs)


def proved(weights, expected, settings=SETTINGS, **beside):
    folded = rc.fold(save(weights, **beside), settings=settings, force=True)
    np.savez("r.npz", input=IMAGES, output_fp64=expected)
    found = {link.name: link.metrics.max_rel_error for link in rc.verify(inputs="r.npz").links}
    assert max(found["recorded"], found["fold"], *(step.max_rel_error for step in folded.certificate)) <= 1e-12
    assert found["stored"] <= 1e-4
    return folded


def distilled(weights):
    width = weights["cls_token"].shape[2]
    more = {"dist_token": torch.randn(1, 1, width), "head_dist.weight": torch.randn(5, width) / 5}
    pos = torch.cat([weights["pos_embed"], torch.randn(1, 1, width)], 1)
    return {**weights, **more, "head_dist.bias": torch.randn(5), "pos_embed": pos}


def with_rows(weights, schedule):
    """The example with other numbers of merged tokens."""
    for index, r in enumerate(schedule):
        if r:
            weights[f"blocks.{index}.pyra_a"] = 0.4 * torch.randn(r, 1)
        else:
            weights = {n: w for n, w in weights.items() if not n.startswith(f"blocks.{index}.pyra_")}
    return weights


def test_a_block_that_merges_nothing_may_have_modulations_without_rows():
    torch.manual_seed(1)
    weights = with_rows(METHOD.example("tiny", seed=5), (8, 2, 2))
    weights["blocks.1.pyra_a"] = torch.zeros(0, 1)
    without = {name: value for name, value in weights.items() if not name.startswith("blocks.1.pyra_")}
    folded = proved(weights, net(without, (8, 0, 2)))
    assert next(fact.value for fact in folded.facts if fact.name == "schedule") == [8, 0, 2]


@pytest.mark.parametrize("schedule", [(4, 3, 2), (8, 0, 2), (0, 5, 1), (1, 1, 0), (8, 4, 2)])
@pytest.mark.parametrize("distil", [False, True])
def test_every_schedule_folds(schedule, distil):
    torch.manual_seed(1)
    weights = with_rows(METHOD.example("tiny", seed=5), schedule)
    weights = distilled(weights) if distil else weights
    folded = proved(weights, net(weights, schedule))
    assert folded.applied == ("pyra",)
    assert next(fact.value for fact in folded.facts if fact.name == "schedule") == list(schedule)
    dead = [step for step in folded.certificate if "the merging -> nothing" in " ".join(step.folded)]
    assert [step.module for step in dead] == (["blocks.2"] if schedule[2] else [])


@pytest.mark.slow
def test_the_graph_of_a_distilled_net():
    rc.fold(save(distilled(METHOD.example("tiny", seed=5))), settings=SETTINGS)
    exported = rc.export(batch=1)
    assert exported.verdict == "passed"
    assert not any(operator.startswith("Scatter") for operator in exported.operators)


def test_nothing_is_scattered_in_a_graph():
    assert not any(operator.startswith("Scatter") for operator in operators_of(graph("pyra-tiny")[0]))


def test_the_last_block_costs_less_not_more():
    """Dropping the dead merging alone would leave more tokens to its MLP."""
    rc.fold(save(METHOD.example("tiny", seed=3)), settings=SETTINGS)
    blocks = rc.inspect("c.pth", settings=SETTINGS).blocks
    assert blocks[-1].deploy.macs < 0.6 * blocks[-1].training.macs
    # in the others a one-hot product stands for the scatter, which no counter counts
    assert all(block.deploy.macs <= 1.05 * block.training.macs for block in blocks)


def test_merging_without_pyra_is_declared_never_guessed():
    weights = {n: w for n, w in METHOD.example("tiny", seed=6).items() if "pyra" not in n}
    for index in range(3):
        weights[f"blocks.{index}.attn.LoRA_a.weight"] = torch.randn(2, 24) / 5
        weights[f"blocks.{index}.attn.LoRA_b.weight"] = torch.randn(72, 2)
    merging = {"args": {"token_merging": True, "merging_schedule": "low"}}
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights, **merging), settings=SETTINGS)
    assert caught.value.code == "setting.needed"
    assert "--set schedule=" in caught.value.hint
    folded = proved(weights, net(weights, (4, 2, 1)), {**SETTINGS, "schedule": "4,2,1"}, **merging)
    assert folded.applied == ("pyra", "lora")
    alone = proved(weights, net(weights, (0, 0, 0)))
    assert next(fact for fact in alone.facts if fact.name == "schedule").value == "no merging"
    assert alone.tolerances["onnx"] == 1e-5


def test_equals_keep_the_first_first():
    merge = Merge(MergeSpec(2, False, 1, False), 4)
    x = torch.arange(28.0).view(1, 7, 4)
    same = torch.ones(1, 7, 4)
    kept, size = merge(x, None, same)
    # even tokens 2 and 4 tie with 6; the first two go into the first odd one
    assert torch.equal(size[0, :, 0], torch.tensor([1.0, 1, 3, 1, 1]))
    assert torch.allclose(kept[0, 2], (x[0, 1] + x[0, 2] + x[0, 4]) / 3)
    assert torch.equal(kept[0, 1], x[0, 6])


class Ranked(nn.Module):
    """Stable sorts of many equals: their places are what a stable sort is about."""

    def forward(self, x):
        levels = (4 * x.mean(1)).round()
        up, down = levels.argsort(dim=-1, stable=True), levels.sort(dim=1, descending=True, stable=True)
        return torch.cat([up.to(x.dtype), down.indices.to(x.dtype), down.values], 1).flatten(1)


def test_a_stable_sort_is_written_as_onnx_and_keeps_equals_in_their_order():
    images = IMAGES[:2, :, :7, :9]
    module, shape = Ranked().eval(), images.shape[1:]
    model = to_onnx(module, shape, output="y", opset=18, batch=None, dynamic_size=False)
    assert operators_of(model)["TopK"] == 2
    right = module(torch.from_numpy(images)).numpy()
    assert (load_onnx(model).run({"input": images})["y"] == right).all()
    double, _ = network_to_onnx(module, shape, input_name="x", outputs=("y",))
    right = module(torch.from_numpy(images.astype(np.float64))).numpy()
    assert (load_onnx(double).run({"x": images.astype(np.float64)})["y"] == right).all()


def test_the_training_form_is_written_as_onnx():
    path = save(METHOD.example("tiny", seed=1))
    read = METHOD.read(read_checkpoint(path), SETTINGS)
    module = with_weights(read.module(), read.tensors, torch.float32)
    model = to_onnx(module, IMAGES.shape[1:], output="logits", opset=18, batch=None, dynamic_size=False)
    with torch.no_grad():
        right = module(torch.from_numpy(IMAGES)).numpy()
    assert np.abs(load_onnx(model).run({"input": IMAGES})["logits"] - right).max() < 1e-4 * np.abs(right).max()


def test_the_generators_take_the_norms_affine():
    torch.manual_seed(2)
    block = {
        n.removeprefix("blocks.0."): w.double() for n, w in METHOD.example("tiny", seed=7).items() if "blocks.0" in n
    }
    folded = fold_modulation(block)
    n0 = torch.randn(4, 24, dtype=torch.float64)
    n = n0 * block["pyra_norm.weight"] + block["pyra_norm.bias"]
    assert torch.allclose(folded["scale"] * (folded["rows"] @ n0) + folded["shift"], block["pyra_a"].T @ n, rtol=1e-12)
    row = torch.tanh(n0 @ folded["channels.weight"].T + folded["channels.bias"])
    assert torch.allclose(row, 2 * torch.sigmoid(n @ block["pyra_b"].T) - 1, rtol=1e-11, atol=1e-14)


def test_schedules():
    assert equation_8(0.5, 12, 196) == (16,) * 12
    assert equation_8(0.5, 24, 196) == (8,) * 24
    assert sum(TABLES["high", (768, 12, False)]) == sum(TABLES["high", (1024, 24, False)]) == 192
    assert 197 - sum(TABLES["low", (768, 12, False)]) == 11
    assert 198 - sum(TABLES["low", (768, 12, True)]) == 42
    weights = {n: w for n, w in METHOD.example("tiny", seed=8).items() if "pyra" not in n}
    weights["blocks.0.attn.LoRA_a.weight"], weights["blocks.0.attn.LoRA_b.weight"] = (
        torch.randn(2, 24),
        torch.randn(72, 2),
    )
    schedule = equation_8(0.6, 3, 16)
    proved(weights, net(weights, schedule), {**SETTINGS, "schedule": "eq8:0.6"})
    for text in ("low", "4,2", "a,b,c", "eq8:2"):
        with pytest.raises(UsageProblem):
            rc.fold("c.pth", settings={**SETTINGS, "schedule": text})


@pytest.mark.slow  # a graph of PYRA takes longest; that of the small net is traced above
@pytest.mark.parametrize("path", sorted((SHARED / "pyra").glob("*.pth")), ids=lambda path: path.stem)
def test_official_checkpoints(path):
    folded = rc.fold(path, settings={"num_heads": "4"})
    assert folded.applied == ("pyra", "lora")
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    rc.export(batch=1)  # a free one takes three times as long to trace
    found = {link.name: link.metrics.max_rel_error for link in rc.verify(inputs=path.with_suffix(".npz")).links}
    assert found["recorded"] <= 1e-14
    assert found["fold"] <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5


@pytest.mark.parametrize(
    ("change", "settings", "code"),
    [
        (lambda w: w.pop("blocks.0.pyra_norm.weight"), SETTINGS, "checkpoint.missing-keys"),
        (lambda w: w.update({"blocks.0.pyra_a": torch.ones(9, 1)}), SETTINGS, "pyra.schedule"),
        (lambda w: w.update({"blocks.0.pyra_a": torch.ones(4)}), SETTINGS, "checkpoint.shape"),
        (lambda w: None, {**SETTINGS, "schedule": "4,4,4"}, "pyra.schedule"),
        (lambda w: None, {}, "setting.needed"),
        (lambda w: None, {**SETTINGS, "image_size": "64"}, "image-size"),
        (lambda w: w.update({"blocks.0.adapter.ln1.weight": torch.ones(2)}), SETTINGS, "pyra.not-foldable"),
        (lambda w: w.update({"visual_prompt_token": torch.ones(1, 2, 24)}), SETTINGS, "pyra.not-foldable"),
        (lambda w: w.update({"head_aux.weight": torch.ones(2, 2)}), SETTINGS, "checkpoint.unexpected-keys"),
        (lambda w: w.update({"pre_logits.fc.weight": torch.ones(24, 24)}), SETTINGS, "checkpoint.missing-keys"),
        (lambda w: w.update({"cls_token": torch.full((1, 1, 24), torch.nan)}), SETTINGS, "checkpoint.not-finite"),
    ],
)  # fmt: skip
def test_what_does_not_fold_is_refused(change, settings, code):
    weights = METHOD.example("tiny", seed=9)
    change(weights)
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights), settings=settings)
    assert caught.value.code == code


def test_merging_in_a_plain_net_when_it_is_asked_for():
    weights = {n: w for n, w in METHOD.example("tiny", seed=12).items() if "pyra" not in n}
    assert rc.inspect(save(weights)).method is None
    with pytest.raises(Refused) as caught:
        rc.fold("c.pth", method="pyra", settings=SETTINGS)
    assert caught.value.code == "method.mismatch"
    rc.fold("c.pth", method="pyra", settings={**SETTINGS, "schedule": "4,2,1"}, force=True)
    np.savez("r.npz", input=IMAGES, output_fp64=net(weights, (4, 2, 1)))
    found = {link.name: link.metrics.max_rel_error for link in rc.verify(inputs="r.npz").links}
    assert max(found["recorded"], found["fold"]) <= 1e-12


def test_another_eps_of_pyras_norm_reaches_the_deploy_form():
    folded = rc.fold(save(METHOD.example("tiny", seed=13)), settings={**SETTINGS, "pyra_eps": "0.1"})
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    assert {link.name: link.metrics.max_rel_error for link in rc.verify().links}["fold"] <= 1e-12


@pytest.mark.parametrize("distil", [False, True])
def test_runs_of_before_are_read(distil):
    """They say whether there is a distillation token, not how many tokens stand before the patches."""
    weights = METHOD.example("tiny", seed=5)
    save(distilled(weights) if distil else weights)
    config = METHOD.read(read_checkpoint(Path("c.pth")), SETTINGS).config
    plain = BACKBONE.to_json(config)
    for block in plain["blocks"]:
        if block["merge"]:
            assert block["merge"].pop("prefix") == 1 + distil
            block["merge"]["distilled"] = distil
    assert BACKBONE.from_json(plain) == config

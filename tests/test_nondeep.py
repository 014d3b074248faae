"""nondeep: against the paper's equations in NumPy at lambda = 1, official files, identification, refusals."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, one_quick
from numpy_reference_networks import gelu

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.nondeep import METHOD
from repaconv.methods.nondeep.paper_equations import fold_scores
from repaconv.methods.nondeep.published_models import example_meta

IMAGES = np.random.default_rng(3).standard_normal((2, 3, 16, 16), dtype=np.float32)
OFFICIAL = sorted((SHARED / "nondeep").glob("*.pth"))


def save(weights, meta, path="c.pth"):
    torch.save({"state_dict": weights, "meta": meta}, path)
    return path


def links(verified):
    return {link.name: link.metrics.max_rel_error for link in verified.links}


def layernorm(x, w, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def net(weights, images, *, heads, value, scale, pool="cls"):
    """Alg. 1 or eqs. 6-7 at lambda = 1, branch by branch."""
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in weights.items()}
    p = w["patch_embed.proj.weight"].shape[2]
    b, c, h, _ = images.shape
    cut = (
        images.astype(np.float64)
        .reshape(b, c, h // p, p, h // p, p)
        .transpose(0, 2, 4, 1, 3, 5)
        .reshape(b, -1, c * p * p)
    )
    x = cut @ w["patch_embed.proj.weight"].reshape(-1, c * p * p).T + w["patch_embed.proj.bias"]
    x = np.concatenate([np.broadcast_to(w["cls_token"], (b, 1, x.shape[2])), x], 1) + w["pos_embed"]
    tokens, width = x.shape[1:]
    for index in range(2):
        block = {n.removeprefix(f"blocks.{index}."): v for n, v in w.items() if n.startswith(f"blocks.{index}.")}
        n = len({name.split(".")[2] for name in block if name.startswith("attn.branches")})
        normed = layernorm(x, block, "norm1")
        parts = []
        for i in range(n):
            qkv = normed @ block[f"attn.branches.{i}.qkv.weight"].T + block.get(f"attn.branches.{i}.qkv.bias", 0.0)
            parts.append(qkv.reshape(b, tokens, 3, heads, width // heads).transpose(2, 0, 3, 1, 4))
        scores = sum(q @ k.swapaxes(-1, -2) for q, k, _ in parts)
        scores = scores / ((sqrt(n) if scale == "sqrt" else n) * sqrt(width // heads))
        attn = np.exp(scores - scores.max(-1, keepdims=True))
        attn /= attn.sum(-1, keepdims=True)
        out = 0.0
        for i in range(n):
            v = sum(v for _, _, v in parts) if value == "value-sum" else parts[i][2]
            mixed = (attn @ v).transpose(0, 2, 1, 3).reshape(b, tokens, width)
            out = out + mixed @ block[f"attn.branches.{i}.proj.weight"].T + block[f"attn.branches.{i}.proj.bias"]
        x = x + block.get("ls1.gamma", 1.0) * out
        normed = layernorm(x, block, "norm2")
        hidden = sum(
            normed @ block[f"mlp.branches.{i}.fc1.weight"].T + block[f"mlp.branches.{i}.fc1.bias"] for i in range(n)
        )
        x = x + block.get("ls2.gamma", 1.0) * sum(
            gelu(hidden) @ block[f"mlp.branches.{i}.fc2.weight"].T + block[f"mlp.branches.{i}.fc2.bias"]
            for i in range(n)
        )
    pooled = layernorm(x, w, "norm")[:, 0] if pool == "cls" else layernorm(x[:, 1:].mean(1), w, "fc_norm")
    return pooled @ w["head.weight"].T + w["head.bias"]


def proved(weights, meta, expected, **arguments):
    folded = rc.fold(save(weights, meta), force=True, **arguments)
    np.savez("r.npz", input=IMAGES, output_fp64=expected)
    found = links(rc.verify(inputs="r.npz"))
    assert max(found["recorded"], found["fold"], *(step.max_rel_error for step in folded.certificate)) <= 1e-12
    assert found["stored"] <= 1e-5
    return folded


@pytest.mark.parametrize("value", ["value-sum", "output-sum"])
@pytest.mark.parametrize("scale", ["sqrt", "sum"])
@pytest.mark.parametrize(("heads", "bias", "pool"), [(3, True, "cls"), (2, False, "avg"), (1, True, "cls")])
def test_every_way_of_joining_folds_as_itself(value, scale, heads, bias, pool):
    weights = METHOD.example("tiny", seed=5)
    if not bias:
        weights = {name: w for name, w in weights.items() if not name.endswith("qkv.bias")}
    if pool == "avg":
        weights = {
            name.replace("norm.", "fc_norm.") if name.startswith("norm.") else name: w for name, w in weights.items()
        }
    meta = example_meta(attn_value=value, score_scale=scale, num_heads=heads, global_pool=pool)
    proved(weights, meta, net(weights, IMAGES, heads=heads, value=value, scale=scale, pool=pool))


def test_branches_that_depend_on_each_other_shrink_to_their_rank():
    weights = METHOD.example("tiny", seed=6)
    for name in list(weights):
        if ".branches.1." in name and "attn" in name:
            weights[name] = 2 * weights[name.replace("branches.1", "branches.0")]
    meta = example_meta(attn_value="output-sum")
    folded = proved(weights, meta, net(weights, IMAGES, heads=3, value="output-sum", scale="sqrt"))
    mixer = folded.config["blocks"][0]["mixer"]
    assert (mixer["qk"], mixer["v"]) == (8, 8)  # not 16: the second branch adds no direction


def test_the_number_of_branches_may_differ_by_block_and_layer_scale_folds():
    weights = METHOD.example("tiny", seed=7)
    for name in list(weights):
        if name.startswith("blocks.0.") and ".branches.1." in name:
            weights[name.replace("branches.1", "branches.2")] = torch.randn_like(weights[name]) / 5
    weights |= {f"blocks.{i}.ls{j}.gamma": 0.4 * torch.randn(24) for i in (0, 1) for j in (1, 2)}
    meta = example_meta()
    del meta["arch"]["num_branches"]
    folded = proved(weights, meta, net(weights, IMAGES, heads=3, value="value-sum", scale="sqrt"))
    assert folded.applied == ("nondeep", "layer scale")


def test_the_cheaper_form_follows_from_the_shapes():
    from repaconv.algebra.affine_maps import Affine

    def parts(n):
        return [Affine.linear(torch.randn(24, 24), torch.randn(24)) for _ in range(n)]

    x = torch.randn(9, 24, dtype=torch.float64)
    for n, rank in ((1, 12), (4, None)):
        queries, keys = parts(n), parts(n)
        folded, k_rows = fold_scores(queries, keys, 2, 3.0, 9)
        width = rank or 24
        assert (folded.out_width, len(k_rows)) == (2 * width, 2 * (rank or 0))
        for head in range(2):
            own = slice(head * width, (head + 1) * width)
            q, k = folded(x)[:, own], x if rank is None else x @ k_rows[own].T
            rows = slice(head * 12, (head + 1) * 12)
            expected = sum(a(x)[:, rows] @ b(x)[:, rows].T for a, b in zip(queries, keys, strict=True)) / 3.0
            assert torch.allclose((q @ k.T).softmax(-1), expected.softmax(-1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("path", one_quick(OFFICIAL))
def test_official_checkpoints(path):
    folded = rc.fold(path)
    assert max(step.max_rel_error for step in folded.certificate) <= 1e-12
    rc.export(batch=1)
    found = links(rc.verify(inputs=path.with_suffix(".npz")))
    assert found["recorded"] <= 1e-14
    assert found["fold"] <= 1e-12
    assert max(found["stored"], found["onnx"]) <= 1e-5


# --- identification -----------------------------------------------------------------------------------


def test_a_recorded_pair_settles_what_the_metadata_does_not_tell():
    weights = METHOD.example("tiny", seed=8)
    np.savez("pair.npz", input=IMAGES, output=net(weights, IMAGES, heads=2, value="output-sum", scale="sum"))
    meta = example_meta()
    for name in ("num_heads", "norm_eps"):
        del meta["arch"][name]
    for name in ("attn_value", "score_scale"):
        del meta["join"][name]
    for given, name in (
        ({}, "num_heads"),
        ({"num_heads": "2"}, "norm_eps"),
        ({"num_heads": "2", "norm_eps": "1e-6"}, "attn_value"),
    ):
        with pytest.raises(Refused) as caught:
            rc.fold(save(weights, meta), settings=given)
        assert caught.value.code == "setting.needed"
        assert f"--set {name}=" in caught.value.hint
    folded = rc.fold("c.pth", identify="pair.npz")
    assert folded.settings == {"attn_value": "output-sum", "score_scale": "sum", "num_heads": "2", "norm_eps": "1e-06"}
    assert "identified by pair.npz" in next(fact for fact in folded.facts if fact.name == "score_scale").source
    assert links(rc.verify(inputs="pair.npz"))["recorded"] <= 1e-12  # the run knows its settings


@pytest.mark.parametrize("merged", ["yes", "no"])
def test_a_recorded_pair_settles_whether_adapters_were_merged(merged):
    weights = METHOD.example("tiny", seed=8)
    a, b = torch.randn(2, 24), torch.randn(72, 2) / 5
    at = "blocks.0.attn.branches.0.qkv"
    both = {**weights, f"{at}.weight": weights[f"{at}.weight"] + 4 * b @ a}
    output = net(both, IMAGES, heads=3, value="value-sum", scale="sqrt")
    np.savez("pair.npz", input=IMAGES, output=output)
    saved = {**(both if merged == "yes" else weights), f"{at}.lora_A": a, f"{at}.lora_B": b}
    folded = rc.fold(save(saved, example_meta()), settings={"lora_alpha": "8"}, identify="pair.npz")
    assert folded.settings["lora_merged"] == merged
    assert links(rc.verify(inputs="pair.npz"))["recorded"] <= 1e-6


def test_a_pair_that_settles_nothing_is_refused(repaconv):
    weights = METHOD.example("tiny", seed=8)
    meta = example_meta()
    del meta["join"]["attn_value"]
    output = net(weights, IMAGES, heads=3, value="value-sum", scale="sqrt")
    np.savez("wrong.npz", input=IMAGES, output=output + 0.1)
    np.savez("other.npz", input=IMAGES, output=output[:, :3])
    np.savez("none.npz", input=IMAGES)
    for pair, code in (("wrong", "nondeep.identify"), ("other", "inputs.shape")):
        with pytest.raises(Refused) as caught:
            rc.fold(save(weights, meta), identify=f"{pair}.npz")
        assert caught.value.code == code
    with pytest.raises(UsageProblem, match="no recorded output"):
        rc.fold("c.pth", identify="none.npz")
    # one branch: values and outputs sum to the same, so both variants are right and none wins
    single = {name: w for name, w in weights.items() if ".branches.1." not in name}
    del meta["arch"]["num_branches"]
    np.savez("both.npz", input=IMAGES, output=net(single, IMAGES, heads=3, value="value-sum", scale="sqrt"))
    with pytest.raises(Refused, match="does not determine attn_value"):
        rc.fold(save(single, meta), identify="both.npz")
    code, _, err = repaconv("fold", save(weights, meta), "--identify", "wrong.npz")
    assert code == 4
    assert "does not determine" in err


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "meta", "code", "words"),
    [
        (0.9, {"lambda": 0.9}, "nondeep.lambda", r"lambda is 0\.9\. .* by \d+% of its size"),
        (0.5, {"lambda": 1.0}, "nondeep.lambda", "in the weights and 1 in the metadata"),
        ([1.0, 0.3], {"lambda": 1.0}, "nondeep.lambda", "1, 0.3 in the weights and 1 in the metadata"),
        ([1.0, 0.3], {"lambda": None}, "nondeep.lambda", "1, 0.3 in the weights"),
        (1.0, {"attn_value": "head-sum"}, "nondeep.join", "attn_value"),
        (1.0, {"ffn": "post-activation"}, "nondeep.join", "ffn"),
        (1.0, {"num_branches": 3}, "nondeep.branches", "0, 1 where the metadata says 3"),
        (1.0, {"num_heads": 5}, "vit.heads", "5 heads"),
    ],
)
def test_metadata_that_does_not_fold(buffer, meta, code, words):
    weights = {**METHOD.example("tiny", seed=9), "join_lambda": torch.tensor(buffer)}
    with pytest.raises(Refused, match=words) as caught:
        rc.fold(save(weights, example_meta(**meta)))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda w: w.pop("blocks.1.attn.branches.0.qkv.weight"), "checkpoint.missing-keys"),
        (lambda w: [w.pop(n) for n in list(w) if n.startswith("blocks.1.attn.branches.0.")], "nondeep.branches"),
        (lambda w: w.update({"blocks.0.attn.gate": torch.ones(2)}), "checkpoint.unexpected-keys"),
        (lambda w: [w.pop(n) for n in list(w) if n.startswith("blocks.0.")], "checkpoint.missing-keys"),
        (lambda w: [w.pop(n) for n in list(w) if ".branches." in n], "method.deployed"),
        (lambda w: w.update({"blocks.0.mlp.branches.0.fc1.weight": torch.ones(35, 24)}), "checkpoint.shape"),
    ],
)
def test_tensors_that_are_not_whole(change, code):
    weights = METHOD.example("tiny", seed=10)
    change(weights)
    with pytest.raises(Refused) as caught:
        rc.fold(save(weights, example_meta()))
    assert caught.value.code == code


def test_the_table_names_the_form_that_fits_the_paper():
    rows = {row.model: row for row in rc.table("nondeep").rows}
    assert rows["D-MAE-6-R, 3 heads, X W X^T"].cost.layer_macs == pytest.approx(595.6e6, abs=0.1e6)
    assert rows["D-MAE-6-R"].cost.macs == pytest.approx(773e6, abs=0.5e6)
    assert rows["D-MAE-6-R"].cost.parameters == pytest.approx(3.49e6, abs=0.005e6)


def test_blocks_of_other_names_are_no_inference_time_network():
    """The format's name alone says nothing of a file whose tensors were renamed."""
    meta = {"format": "nondeep-branches-v1"}
    for name, form in (("blocks", "deploy"), ("layers", None)):
        path = Path(save({f"{name}.0.mlp.fc1.weight": torch.zeros(4, 4)}, meta))
        found = METHOD.detect(read_checkpoint(path))
        assert (found and found.form) == form

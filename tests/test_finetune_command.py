"""`repaconv finetune`, and the untrained training-time architectures from which it starts: what is copied, kept,
resumed and refused.
"""

from __future__ import annotations

import json
from itertools import count, pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from finetune_digits import MARK, table
from test_score_and_convert_commands import DEPTH, HEADS, ROOT, images, plain_weights
from train import textures

import repaconv as rc
from repaconv.checkpoints import read_checkpoint
from repaconv.conversion.finetuning import training_loop
from repaconv.conversion.finetuning.distillation_targets import augment
from repaconv.conversion.finetuning.dwconv_gates import cool_to
from repaconv.conversion.finetuning.original_networks import read_original
from repaconv.conversion.finetuning.trainable_batchnorm import LearningBatchNorm, recompute_statistics
from repaconv.conversion.finetuning.training_loop import whitened
from repaconv.conversion.finetuning.training_plan import TrainingPlan
from repaconv.conversion.image_splits import role_in_training, role_of, split_images
from repaconv.conversion.plain_vit import PlainViT, attention_output, read_plain
from repaconv.core.errors import Refused, UsageProblem
from repaconv.methods.nondeep.checkpoint_reading import read_at_any_lambda
from repaconv.verification.input_batches import Batch, Inputs
from repaconv.verification.model_runners import with_weights

VIT = {"settings": {"num_heads": str(HEADS)}}
POOL = {"settings": {"pool_size": "3", "stem_stride": "2"}}


def pool_weights(widths=(6, 10)):
    """A PoolFormer with a block in each stage, by the official names."""
    torch.manual_seed(0)

    def conv(name, out, into, side):
        weight = torch.randn(out, into, side, side) / sqrt(into * side**2)
        return {f"{name}.weight": weight, f"{name}.bias": 0.1 * torch.randn(out)}

    def norm(name, width):
        return {f"{name}.weight": 1 + 0.3 * torch.randn(width), f"{name}.bias": 0.3 * torch.randn(width)}

    weights = conv("patch_embed.proj", widths[0], 3, 7)
    for stage, (narrow, wide) in enumerate(pairwise(widths)):
        weights |= conv(f"network.{2 * stage + 1}.proj", wide, narrow, 3)
    for stage, width in zip(count(step=2), widths, strict=False):
        block = norm("norm1", width) | norm("norm2", width)
        block |= conv("mlp.fc1", 2 * width, width, 1) | conv("mlp.fc2", width, 2 * width, 1)
        block |= {f"layer_scale_{n}": 0.5 + 0.1 * torch.randn(width) for n in (1, 2)}
        weights |= {f"network.{stage}.0.{name}": tensor for name, tensor in block.items()}
    return weights | norm("norm", width) | {"head.weight": torch.randn(5, width), "head.bias": torch.randn(5)}


@pytest.fixture
def vit(tmp_path):
    torch.save(plain_weights(), "vit.pth")
    torch.save(plain_weights(tokens=False), "flat.pth")
    torch.save(pool_weights(), "pool.pth")
    np.savez("x.npz", input=images(160), labels=np.arange(160) % 5)
    return Path("vit.pth")


@pytest.fixture
def converted(vit):
    rc.convert(vit, inputs="x.npz", blocks="2", **VIT)
    return Path("repaconv-out/vit-dwconv")


# --- the loop -------------------------------------------------------------------------------------------


def test_a_trained_network_is_evaluated_on_other_images_and_folded(vit, repaconv):
    rc.convert("pool.pth", inputs="x.npz", method="riformer", to="training-form", **POOL)
    code, out, err = repaconv("finetune", "--inputs", "x.npz", "--epochs", "2", "--batch", "16")
    assert code == 0
    assert "epoch 2 of 2" in err
    assert "kept" in out
    done = json.loads(Path("repaconv-out/pool-riformer-finetuned/finetune.json").read_text())
    costs = [epoch["cost"] for epoch in done["epochs"]]
    assert len(costs) == 3
    assert done["best_epoch"] == costs.index(min(costs)) > 0  # it did learn something
    assert done["epochs"][0].get("loss") is None
    shares = done["images"]
    assert shares["calibration"] > shares["validation"] + shares["test"]
    assert done["evaluation"]["metrics"]["images"] == shares["test"]
    links = {link.name: link for link in rc.verify(inputs="x.npz").links}
    assert links["fold"].verdict == links["stored"].verdict == "passed"
    assert links["converted"].metrics.images == shares["test"]  # of 160, those that nobody has seen
    assert links["fold"].accuracy.reference == links["fold"].accuracy.candidate
    assert "Fine-tuning after the conversion (lossy)" in Path(rc.report().output_files[0]).read_text()
    assert not list(Path("repaconv-out/pool-riformer-finetuned").glob("*.state"))


def test_the_start_is_kept_where_nothing_is_better(converted, monkeypatch):
    done = rc.finetune(converted, inputs="x.npz", epochs=1, lr=0.9)
    assert done.best_epoch == 0
    assert done.evaluation == done.start_evaluation
    before, after = (read_checkpoint(path).tensors for path in (
        converted / "converted.safetensors", "repaconv-out/vit-dwconv-finetuned/finetuned.safetensors"))  # fmt: skip
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_interrupted_training_resumes_to_the_same_bits(vit):
    def broken(what, _done, _total):
        if what.startswith("epoch 2"):
            raise KeyboardInterrupt

    rc.convert("pool.pth", inputs="x.npz", method="riformer", to="training-form", **POOL)
    converted, asked = (
        Path("repaconv-out/pool-riformer"),
        {"inputs": "x.npz", "epochs": 3, "batch": 24, "grad_accum_steps": 2},
    )
    whole = rc.finetune(converted, out="whole", **asked)
    with pytest.raises(KeyboardInterrupt):
        rc.finetune(converted, out="broken", **asked, progress=broken)
    under_way = json.loads(Path("broken/finetune.json").read_text())
    assert (len(under_way["epochs"]), under_way.get("payload")) == (2, None)
    before = {path.name: path.read_bytes() for path in Path("broken").iterdir()}
    for other in ({**asked, "seed": 1}, {**asked, "samples": 100}):
        with pytest.raises(Refused) as refused:
            rc.finetune(converted, out="broken", **other)
        assert refused.value.code == "finetune.other"
    assert {path.name: path.read_bytes() for path in Path("broken").iterdir()} == before
    lines = []
    resumed = rc.finetune(converted, out="broken", **asked, progress=lambda what, *_: lines.append(what))
    assert not any(what.startswith("epoch 1") for what in lines)
    assert resumed.payload.sha256 == whole.payload.sha256
    assert resumed.epochs == whole.epochs
    assert rc.finetune(converted, out="broken", **{**asked, "seed": 1}).payload.sha256 != whole.payload.sha256


def test_a_training_that_ended_and_was_not_folded_is_folded_and_not_repeated(converted):
    def in_training(what):
        return what.startswith(("epoch", "evaluate"))

    def broken(what, _done, _total):
        if not in_training(what):
            raise KeyboardInterrupt

    asked, message = {"inputs": "x.npz", "epochs": 1}, []
    with pytest.raises(KeyboardInterrupt):
        rc.finetune(converted, out="broken", **asked, progress=broken)
    trained = json.loads(Path("broken/finetune.json").read_text())["payload"]["sha256"]
    assert not Path("broken/fold.json").exists()
    for anew in (False, True):  # what is trained and folded is trained anew
        message.clear()
        done = rc.finetune(converted, out="broken", **asked, progress=lambda what, *_: message.append(what))
        assert any(in_training(what) for what in message) == anew
        assert done.payload.sha256 == trained
        assert json.loads(Path("broken/fold.json").read_text())["origin"]["sha256"] == trained


@pytest.mark.parametrize("step", ["fold", "epoch 2"])
def test_a_training_whose_file_is_gone_is_repeated_and_one_whose_file_was_changed_is_left(converted, step):
    def broken(what, _done, _total):
        if what.startswith(step) or not what.startswith(("epoch", "evaluate")):
            raise KeyboardInterrupt

    asked = {"inputs": "x.npz", "epochs": 2, "batch": 64}
    with pytest.raises(KeyboardInterrupt):
        rc.finetune(converted, out="broken", **asked, progress=broken)
    made = json.loads(Path("broken/finetune.json").read_text())
    file = Path("broken") / (made.get("payload") or made["other_files"][0])["path"]
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(UsageProblem, match=f"{file.name} already exists.*") as refused:
        rc.finetune(converted, out="broken", **asked)
    assert "Move it away" in refused.value.hint
    file.unlink()
    lines = []
    done = rc.finetune(converted, out="broken", **asked, progress=lambda what, *_: lines.append(what))
    assert any(what.startswith("epoch 1") for what in lines)
    assert json.loads(Path("broken/fold.json").read_text())["origin"]["sha256"] == done.payload.sha256


def test_an_interrupted_conversion_resumes_in_the_same_coordinates(converted):
    def broken(what, _done, _total):
        if what.startswith("epoch 2"):
            raise KeyboardInterrupt

    asked = {"inputs": "x.npz", "epochs": 2, "batch": 24}
    whole = rc.finetune(converted, out="whole", **asked)
    with pytest.raises(KeyboardInterrupt):
        rc.finetune(converted, out="broken", **asked, progress=broken)
    assert rc.finetune(converted, out="broken", **asked).epochs == whole.epochs


MERGING = {"pyra": {"schedule": "4,4,0"}, "dwconv": {"schedule": "0,5,0", "blocks": "0,"}}


@pytest.mark.parametrize("method", MERGING)
def test_a_network_that_merges_is_trained_with_its_merging(vit, method):
    torch.save({name: t for name, t in plain_weights().items() if "register" not in name}, "cls.pth")
    run = Path(rc.convert("cls.pth", inputs="x.npz", method=method, **MERGING[method], **VIT).output_files[0]).parent
    done = rc.finetune(run, inputs="x.npz", epochs=4, batch=16, lr=1e-3)
    assert done.best_epoch > 0
    assert done.epochs[done.best_epoch].cost < done.epochs[0].cost
    finetuned = run.with_name(f"{run.name}-finetuned")
    links = {link.name: link for link in rc.verify(finetuned, inputs="x.npz").links}
    assert links["fold"].verdict == "passed"
    assert links["converted"].metrics is not None
    blocks = json.loads((finetuned / "fold.json").read_text())["config"]["blocks"]
    assert (
        ",".join(str(block["merge"]["r"] if block["merge"] else 0) for block in blocks) == MERGING[method]["schedule"]
    )


def test_what_a_layer_reads_is_alike_in_all_directions_to_what_learns():
    torch.manual_seed(0)
    net, given = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)), torch.randn(64, 6)
    given = given @ (torch.eye(6) + 0.4 * torch.rand(6, 6))
    learnt = whitened(net, given, 16)
    for each, layer, read in zip(learnt, net, (given, net[0](given).detach()), strict=True):
        before, seen = layer.weight.detach().clone(), (read @ each.root).double()
        assert torch.linalg.cond(seen) < 1.2 < torch.linalg.cond(read)
        each.renew()
        assert torch.allclose(layer.weight, before, atol=1e-4)
    was = net(given).square().sum()
    was.backward()
    learnt[0].heed()
    with torch.no_grad():  # U learns by what W was told
        learnt[0].inner.sub_(1e-4 * learnt[0].inner.grad / learnt[0].inner.grad.norm())
    learnt[0].renew()
    assert net(given).square().sum() < was


def test_images_that_a_conversion_fitted_or_chose_by_only_train():
    given = images(300)
    roles = [(role_of(image), role_in_training(image)) for image in given]
    assert {now for before, now in roles if before != "test"} == {"calibration"}
    assert {now for before, now in roles if before == "test"} == {"validation", "test"}
    inputs = Inputs("some", given.shape, lambda start, stop: Batch({"input": given[start:stop]}))
    parted = split_images(inputs, 300, role_in_training)
    assert [len(each.images) for each in parted] == [
        sum(now == role for _, now in roles) for role in ("calibration", "validation", "test")
    ]


def test_rate_and_changes_of_images_are_of_the_step_alone():
    pace = training_loop.TrainingSettings(3, 8, 1, 1e-3, 0, lower=False)
    assert pace.rate_at(0.0) == 0
    assert pace.rate_at(training_loop.WARMUP) == pytest.approx(1e-3)
    assert pace.rate_at(1.0) == pytest.approx(0, abs=1e-12)
    some = torch.from_numpy(images(4))
    first, second = (augment(some, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, some)


def test_statistics_are_those_of_all_images_with_the_weights_of_now():
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), LearningBatchNorm(6, 1e-5)).eval()
    given = torch.randn(48, 7, 6)
    recompute_statistics(net, given.split(16))
    behind = net[0](given).flatten(0, 1)
    assert torch.allclose(net[1].running_mean, behind.mean(0), atol=1e-6)
    assert torch.allclose(net[1].running_var, behind.var(0), rtol=0.05)
    assert not net.training


# --- the forms ------------------------------------------------------------------------------------------


FORMS = {
    "repavit": ("vit.pth", {"idle_ratio": 0.5, **VIT}),
    "nondeep": ("vit.pth", {"branches": 3, **VIT}),
    "riformer": ("pool.pth", POOL),
    "dwconv": ("flat.pth", {"blocks": "2", **VIT}),
}


@pytest.mark.parametrize(
    "method", ["repavit", *(pytest.param(m, marks=pytest.mark.slow) for m in FORMS if m != "repavit")]
)
def test_an_ordinary_network_becomes_a_method_s_and_folds(vit, method):
    """Accuracy before and after folding is equal, and what folds is the method's."""
    source, asked = FORMS[method]
    formed = rc.convert(source, inputs="x.npz", method=method, to="training-form", **asked)
    assert formed.kind == "training-form"
    assert formed.description
    done = rc.finetune(inputs="x.npz", epochs=1, batch=64)
    assert done.method == method
    links = {link.name: link for link in rc.verify(inputs="x.npz").links}
    assert links["fold"].verdict == links["stored"].verdict == "passed"
    assert links["fold"].accuracy.reference == links["fold"].accuracy.candidate
    assert links["converted"].metrics.top1_agreement == done.evaluation.metrics.top1_agreement
    finetuned = Path(f"repaconv-out/{Path(source).stem}-{method}-finetuned/finetuned.safetensors")
    alone = rc.fold(finetuned, out="alone", settings=formed.settings)
    assert alone.method == method


def opened(path, **settings):
    return PlainViT.of(read_plain(read_checkpoint(path), {"num_heads": str(HEADS), **settings}))


def test_separate_branches_are_the_parallel_blocks(vit):
    rc.convert(vit, inputs="x.npz", method="nondeep", to="training-form", branches=3, **VIT)
    reading = read_at_any_lambda(read_checkpoint(Path("repaconv-out/vit-nondeep/converted.safetensors")), {})
    net = with_weights(reading.module(), reading.tensors, torch.float32).eval()
    plain, given = opened(vit), torch.from_numpy(images(3))
    with torch.no_grad():
        x = plain.net.embed(given)
        x = x + sum(b.ls1(b.attn.proj(attention_output(b, x, HEADS))) for b in plain.blocks)
        x = x + sum(b.ls2(b.mlp(b.norm2(x))) for b in plain.blocks)
        assert torch.allclose(net(given), plain.net.read_out(x), atol=1e-4)


def test_batchnorms_have_the_statistics_of_what_they_see(vit):
    """An idle channel's mean is that of the residual test; behind an active one the second BatchNorm does nothing."""
    rc.convert(vit, inputs="x.npz", method="repavit", to="training-form", idle_ratio=0.75, **VIT)
    tensors = read_checkpoint(Path("repaconv-out/vit-repavit/converted.safetensors")).tensors
    for index in range(DEPTH):
        mlp = {name.removeprefix(f"blocks.{index}.mlp."): tensor for name, tensor in tensors.items()}
        means, active = mlp["fc1.weight"] @ mlp["norm1.bias"] + mlp["fc1.bias"], 5
        assert torch.allclose(mlp["norm2.running_mean"][active:], means[active:], atol=1e-4)
        assert not torch.allclose(mlp["norm2.running_mean"][:active], means[:active], atol=1e-2)
        assert torch.allclose(mlp["norm2.weight"][:active], (mlp["norm2.running_var"][:active] + 1e-5).sqrt())
        assert torch.allclose(mlp["norm2.bias"][:active], mlp["norm2.running_mean"][:active])


def test_pooling_becomes_the_nearest_affine(vit):
    """timm's names are the official ones; A(z) - z follows pool(z) - z better than nothing does."""
    official = read_original(read_checkpoint(Path("pool.pth")), POOL["settings"])
    timm = {
        name.replace("patch_embed.proj.", "stem.conv.").replace("network.0.0.", "stages.0.blocks.0.")
        .replace("network.2.0.", "stages.1.blocks.0.").replace("network.1.proj.", "stages.1.downsample.conv.")
        .replace("layer_scale_1", "layer_scale1.scale").replace("layer_scale_2", "layer_scale2.scale")
        .replace("head.", "head.fc.") if not name.startswith("norm.") else f"head.{name}": tensor
        for name, tensor in pool_weights().items()
    }  # fmt: skip
    torch.save(timm, "timm.pth")
    other, given = read_original(read_checkpoint(Path("timm.pth")), POOL["settings"]), torch.from_numpy(images(4))
    with torch.no_grad():
        assert torch.equal(official.net(given), other.net(given))
    done = rc.convert("pool.pth", inputs="x.npz", method="riformer", to="training-form", **POOL)
    tensors = read_checkpoint(Path("repaconv-out/pool-riformer/converted.safetensors")).tensors
    assert 0 < float(tensors["network.0.0.token_mixer.affine.weight"].mean()) < 1
    assert done.evaluation.metrics.norm_error > 0


def test_a_published_poolformer_pools_as_its_own_code_does(tmp_path):
    """Over 3 x 3 in all sizes; RePaViT trained the small ones with 7 x 7."""
    torch.save(pool_weights((64, 128, 320, 512)), "s12.pth")
    torch.save(pool_weights(), "pool.pth")

    def sides(name, **settings):
        net = read_original(read_checkpoint(Path(name)), settings).net
        return {part.kernel_size for part in net.modules() if isinstance(part, torch.nn.AvgPool2d)}

    assert sides("s12.pth") == {3}
    assert sides("s12.pth", pool_size="7") == {7}
    with pytest.raises(Refused, match="no tensor tells the side of PoolFormer's pooling window"):
        sides("pool.pth")
    for wrong in ("4", "wide"):
        with pytest.raises(UsageProblem, match="pool_size"):
            sides("pool.pth", pool_size=wrong)


def test_gates_cool_from_a_choice_by_chance_to_the_largest(vit):
    rc.convert("flat.pth", inputs="x.npz", to="training-form", blocks="2", **VIT)
    from repaconv.conversion.finetuning.training_architectures import training_plan_of

    found = read_checkpoint(Path("repaconv-out/flat-dwconv/converted.safetensors"))
    course: TrainingPlan = training_plan_of("dwconv", found, {})
    net = course.net.train()
    cool_to(net, 0.0)
    soft = net._gates()
    assert float(soft.detach().sum()) == pytest.approx(2, abs=0.2)
    assert bool((soft > 0).all())
    soft.sum().backward()
    assert net.gate["weight"].grad is not None
    cool_to(net, 1.0)
    assert sorted(net._gates().tolist()) == [0.0] * (DEPTH - 2) + [1.0] * 2
    with pytest.raises(Refused, match="soft"):  # what is not trained does not fold
        rc.fold("repaconv-out/flat-dwconv/converted.safetensors")


def test_the_page_has_the_figures_of_the_result():
    rows = json.loads((ROOT / "benchmarks/results/finetune_digits.json").read_text())["rows"]
    _, shown, _ = (ROOT / "docs/finetune.md").read_text().split(MARK)
    assert shown == table(rows)
    kept = {row["name"]: row for row in rows}
    assert all(row["trained"] == row["folded"] for row in rows)
    assert kept["dwconv: half of the blocks"]["trained"] >= kept["dwconv: half of the blocks"]["network"] - 0.01
    static = kept["dwconv: all six, static"]
    assert static["trained"] >= static["network"] - 0.025


# --- something harder than digits ------------------------------------------------------------------------


def test_textures_are_seeded_and_of_all_classes_alike():
    given = textures.made(500, 3)
    assert given.images.shape == (500, 3, 64, 64)
    assert np.bincount(given.labels).min() >= 20 == 500 // textures.CLASSES
    again, other = textures.made(40, 3), textures.made(40, 4)
    assert np.array_equal(again.images, given.images[:40])
    assert not np.array_equal(other.images, again.images)
    shades = given.images.mean((2, 3))  # what a class has of colour is chance
    spread = np.stack([shades[given.labels == each].mean(0) for each in range(textures.CLASSES)]).std(0)
    assert (spread < 2 * shades.std(0) / np.sqrt(20)).all()


# --- refusals -------------------------------------------------------------------------------------------


WRONG = {
    "convert.unknown": {"to": "deploy-form"},
    "convert.unknown ": {"to": None, "method": "repavit"},
    "convert.unknown  ": {"method": "pyra"},
    "convert.branches": {"method": "nondeep", "branches": 2},
    "convert.idle-ratio": {"method": "repavit", "idle_ratio": 1.5},
    "convert.blocks": {"blocks": "0,1"},
    "convert.gates": {"blocks": "2"},
    "convert.original": {"method": "riformer"},
}


def test_no_training_form_where_there_is_none(vit):
    for code, given in WRONG.items():
        with pytest.raises((Refused, UsageProblem)) as refused:
            rc.convert(vit, **{"inputs": "x.npz", "to": "training-form", **VIT, **given})
        assert refused.value.code == code.strip()
        assert refused.value.hint
        assert not Path("repaconv-out").exists()


BAD = {
    "usage.inputs": {"inputs": None},
    "images.none": {"inputs": None, "images": "empty"},
    "inputs.shape": {"inputs": "small.npz"},
    "inputs.not-finite": {"inputs": "nan.npz"},
    "convert.too-few": {"inputs": "few.npz"},
    "finetune.teacher": {"teacher": "other.pth", "teacher_settings": VIT["settings"]},
    "finetune.precision": {"precision": "int4"},
    "finetune.rate": {"lr": -1.0},
    "finetune.no-conversion": {"run": "empty"},
    "run.foreign-files": {"out": "foreign"},
}


def test_what_cannot_be_trained_is_refused_and_nothing_is_written(converted):
    Path("empty").mkdir()
    Path("foreign").mkdir()
    Path("foreign/mine.txt").write_text("mine")
    np.savez("small.npz", input=images(80)[:, :, :6])
    np.savez("few.npz", input=images(2))
    broken = images(80)
    broken[7, 0, 0, 0] = np.nan
    np.savez("nan.npz", input=broken)
    torch.save(plain_weights(classes=7), "other.pth")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for code, given in BAD.items():
        asked = {"inputs": "x.npz", "run": converted, **given}
        with pytest.raises((Refused, UsageProblem)) as refused:
            rc.finetune(asked.pop("run"), **asked)
        assert refused.value.code == code
        assert refused.value.hint
        assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    Path("vit.pth").unlink()
    with pytest.raises(Refused, match="is missing"):
        rc.finetune(converted, inputs="x.npz")

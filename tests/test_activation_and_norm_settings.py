"""Settings that no tensor shows: the activation, and norms without weights. Each is read from the file and reported
with its source, or the checkpoint is refused.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from repaconv.backbones.activation_setting import activation_kind
from repaconv.checkpoints import read_checkpoint
from repaconv.core import plugins
from repaconv.core.errors import Refused
from repaconv.method_api.fold_error import max_rel_error
from repaconv.methods.nondeep.published_models import example_meta

VITS = ("pyra", "nondeep", "dwconv", "repavit")


def read(name, settings=None, weights=None, **beside):
    """A method's form of its tiny example, changed."""
    method = plugins.load(plugins.METHODS, name)
    if name == "nondeep":
        beside.setdefault("meta", example_meta())
    torch.save({"model": weights or method.example("tiny", seed=1), **beside}, "c.pth")
    heads = {} if name == "nondeep" else {"num_heads": "3"}
    return method, method.read(read_checkpoint("c.pth"), {**heads, **(settings or {})})


def outputs(method, form):
    """Trained and folded, in float64, on the same images."""
    from repaconv.verification.model_runners import TorchRunner

    images = torch.randn(2, 3, *form.config.image_size, generator=torch.Generator().manual_seed(0)).numpy()
    folded = {name: w for part in form.parts() for name, w in part.tensors.items()}
    deploy = plugins.load(plugins.BACKBONES, form.backbone).deploy(form.config)
    runners = (
        TorchRunner(*each, double=True) for each in ((form.module().eval(), form.tensors), (deploy.eval(), folded))
    )
    return tuple(torch.from_numpy(runner.run({"input": images})["output"]) for runner in runners)


@pytest.mark.parametrize("name", VITS)
def test_the_activation_is_read_reported_and_computed(name):
    beside = (
        {"args": {"act_layer": "quick_gelu", "idle_ratio": 0.75}} if name != "nondeep" else {"meta": example_meta()}
    )
    if name == "nondeep":
        beside["meta"]["arch"]["act"] = "quick_gelu"
    method, form = read(name, **beside)
    fact = next(fact for fact in form.facts if fact.name == "act")
    assert (fact.value, fact.source) == ("QuickGELU", "meta.arch.act" if name == "nondeep" else "args.act_layer")
    trained, folded = outputs(method, form)
    assert max_rel_error(folded, trained) <= 1e-12
    method, usual = read(name, {"idle_ratio": "0.75"} if name == "repavit" else {})
    assert next(fact for fact in usual.facts if fact.name == "act").source.startswith("default of the official code")
    assert max_rel_error(outputs(method, usual)[0], trained) > 1e-6
    # the net as trained is another one, and by the activation alone
    parts = {type(part).__name__ for part in form.module().modules()}
    assert "QuickGELU" in parts
    assert "GELU" not in parts


@pytest.mark.parametrize(
    ("args", "settings", "code"),
    [
        ({"act_layer": "mish"}, {}, "activation.unknown"),
        ({"act_layer": "gelu", "model_kwargs": {"act_layer": "relu"}}, {}, "activation.ambiguous"),
    ],
)
def test_an_activation_that_is_not_known_is_refused(args, settings, code):
    with pytest.raises(Refused) as caught:
        read("pyra", settings, args=args)
    assert caught.value.code == code


def test_a_user_against_the_file_overrules_it():
    _, form = read("pyra", {"act": "ReLU"}, args={"act_layer": "gelu", "activation": None})
    fact = next(fact for fact in form.facts if fact.name == "act")
    assert (fact.value, fact.against, fact.overrules) == ("ReLU", "args.act_layer says GELU", True)


def test_spellings():
    said = ("nn.GELU", "gelu_pytorch_tanh", {"type": "GELU", "approximate": "tanh"}, "Swish", {"type": "GELU", "a": 1})
    assert [activation_kind(each) for each in said] == ["GELU", "GELU-tanh", "GELU-tanh", "SiLU", None]
    assert read("pyra", args={"act_layer": nn.ReLU})[1].blocks[0].act == "ReLU"  # a class is read as its name


def without_norms(name):
    weights = plugins.load(plugins.METHODS, name).example("tiny", seed=1)
    return {key: w for key, w in weights.items() if key.split(".")[2:3] not in (["norm1"], ["norm2"])}


@pytest.mark.parametrize("name", VITS[:3])
def test_norms_without_keys_are_asked_for(name):
    for given in ({}, {"norm1": "plain"}):
        with pytest.raises(Refused) as caught:
            read(name, given, without_norms(name))
        assert caught.value.code == "setting.needed"
    left = []
    for kind in ("plain", "none"):
        method, form = read(name, {"norm1": kind, "norm2": kind}, without_norms(name))
        trained, folded = outputs(method, form)
        assert max_rel_error(folded, trained) <= 1e-12
        left.append(trained)
    assert max_rel_error(*left) > 1e-2


def test_batchnorm_has_an_eps_of_its_own():
    weights = plugins.load(plugins.METHODS, "dwconv").example("tiny", seed=1)
    for norm in ("blocks.0.norm1", "blocks.1.norm2", "norm"):
        weights |= {f"{norm}.running_mean": torch.randn(24), f"{norm}.running_var": torch.full((24,), 1e-5)}
    method, form = read("dwconv", {}, weights)
    facts = {fact.name: fact.value for fact in form.facts}
    assert (facts["bn_eps"], facts["norm_eps"]) == (1e-5, 1e-6)
    training = form.module()
    found = [training.get_submodule(norm).eps for norm in ("blocks.0.norm1", "blocks.0.norm2", "norm")]
    assert found == [1e-5, 1e-6, 1e-5]
    assert max_rel_error(*outputs(method, form)) <= 1e-12
    _, other = read("dwconv", {"bn_eps": "1e-3"}, weights)
    assert other.config.batch_eps == 1e-3

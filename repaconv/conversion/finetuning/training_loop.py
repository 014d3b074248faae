"""The training loop: AdamW, warm-up and cosine schedule, averaged weights; the best epoch (or the start) is kept."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from repaconv.conversion.conversion_evaluation import Evaluation
from repaconv.conversion.finetuning.distillation_targets import (
    augment,
    output_loss,
    recorded_outputs,
    relation_loss,
    relative_error,
)
from repaconv.conversion.finetuning.trainable_batchnorm import recompute_statistics
from repaconv.conversion.finetuning.training_plan import TrainingPlan
from repaconv.conversion.image_splits import ImageSplits
from repaconv.core.errors import Refused
from repaconv.core.progress import Progress
from repaconv.results import Epoch
from repaconv.verification.accuracy_budget import Budget

# Linear layers with whitened inputs
#
# The inputs of W^O in a conversion vary little in most directions, and W^O has large weights to amplify these small
# differences. A small step of every weight then changes the output a lot, and a learning rate that is small enough for
# W^O trains nothing else. So W = U A, where A is the inverse square root of the second moments of the layer's inputs at
# the start: U is trained, W is used.

MOMENT_IMAGES = 256
"""Number of images from which the second moments are computed."""
MOMENT_FLOOR = 1e-4
"""Added to the moments, relative to their mean, so that directions with less variance do not amplify noise."""


class Whitened(NamedTuple):
    """A layer's weight W [o, i], the matrix U [o, i] that is trained instead, and A [i, i]."""

    weight: nn.Parameter
    inner: nn.Parameter
    root: Tensor

    def heed(self) -> None:
        """Compute the gradient of U from that of W."""
        assert self.weight.grad is not None
        self.inner.grad = self.weight.grad @ self.root

    @torch.no_grad()
    def renew(self) -> None:
        """Compute W from the current U."""
        self.weight.copy_(self.inner @ self.root)


@torch.no_grad()
def whitened(net: nn.Module, images: Tensor, at_once: int) -> tuple[Whitened, ...]:
    """Whiten all linear layers that run on images [N, C, H, W]."""
    sums: dict[nn.Linear, Tensor] = {}

    def add(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        rows = given[0].flatten(0, -2).double()
        sums[layer] = sums.get(layer, torch.zeros((), dtype=torch.float64)) + rows.mT @ rows

    hooks = [module.register_forward_pre_hook(add) for module in net.modules() if isinstance(module, nn.Linear)]
    for some in torch.split(images[:MOMENT_IMAGES], at_once):
        net(some)
    for hook in hooks:
        hook.remove()
    return tuple(_whitened(layer, total) for layer, total in sums.items())


def _whitened(layer: nn.Linear, moments: Tensor) -> Whitened:
    values, vectors = torch.linalg.eigh(moments / moments.diagonal().mean())
    roots = (values.clamp_min(0) + MOMENT_FLOOR).sqrt()
    inner = layer.weight.detach().double() @ (vectors * roots) @ vectors.mT
    assert isinstance(layer.weight, nn.Parameter)
    return Whitened(layer.weight, nn.Parameter(inner.float()), ((vectors / roots) @ vectors.mT).float())


# The training loop

WEIGHT_DECAY, CLIP, WARMUP = 0.05, 1.0, 0.1
AVERAGE_DECAY = 0.999
"""Decay of the weight average per step; smaller during the first steps."""
STATISTICS_BATCH = 64
"""Batch size for computing BatchNorm statistics."""
State = dict[str, Any]


@dataclass(frozen=True)
class TrainingSettings:
    """Length and learning rate of the training.

    Attributes:
        epochs: Number of epochs.
        batch: Batch size.
        accumulate: Number of batches per optimizer step.
        rate: The maximum learning rate.
        seed: Seed of the order and the augmentation of images.
        lower: Whether to compute in bfloat16 (autocast).
    """

    epochs: int
    batch: int
    accumulate: int
    rate: float
    seed: int
    lower: bool

    def rate_at(self, share: float) -> float:
        """Return the learning rate at that fraction of the training: linear warm-up, then cosine decay."""
        if share < WARMUP:
            return self.rate * share / WARMUP
        return self.rate * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP))) / 2


@dataclass(frozen=True)
class TrainingData:
    """The teacher, the training images, and the evaluation against the original on the validation images."""

    teacher: nn.Module
    images: Tensor
    evaluation: Evaluation
    teacher_is_original: bool  # whether the teacher is the original network, whose modules can be imitated


class Training:
    """A running training: the network, its average, and the best weights so far."""

    def __init__(self, plan: TrainingPlan, data: TrainingData, settings: TrainingSettings) -> None:
        self.plan, self.data, self.settings = plan, data, settings
        self.net = deepcopy(plan.net).requires_grad_(True)  # its tensors may be shared
        self.average = deepcopy(plan.net).requires_grad_(False)
        self.whitened = whitened(self.net, data.images, STATISTICS_BATCH) if plan.whitened else ()
        self.optimizer = torch.optim.AdamW(_groups(plan, self.net, self.whitened), settings.rate, fused=True)
        self.steps = 0
        start = self._settled(self.net)
        self.best, self.epochs = _weights(start), [self._evaluated(start)]

    @property
    def done(self) -> int:
        """The number of finished epochs."""
        return len(self.epochs) - 1

    @property
    def best_epoch(self) -> int:
        """The epoch that was best on the validation images; 0 is the start."""
        return min(range(len(self.epochs)), key=lambda epoch: self.epochs[epoch].cost)

    def state(self) -> State:
        """Return everything that the next epoch depends on."""
        return {
            "net": self.net.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best,
            "optimiser": self.optimizer.state_dict(),
            "whitened": [each.inner.detach() for each in self.whitened],
            "steps": self.steps,
        }

    def load(self, state: State, epochs: list[Epoch]) -> None:
        """Resume from a saved state."""
        self.net.load_state_dict(state["net"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimiser"])
        for each, inner in zip(self.whitened, state["whitened"], strict=True):
            each.inner.data.copy_(inner)
        self.best, self.steps, self.epochs = state["best"], state["steps"], list(epochs)

    def finished(self) -> nn.Module:
        """Return the best network as it will be folded."""
        net = deepcopy(self.average)
        self.plan.at(net, 1.0)
        net.load_state_dict(self.best)
        return net.eval()

    def started(self) -> nn.Module:
        """Return the network at the start, as it would be folded."""
        return self._settled(self.plan.net)

    def train(self, progress: Progress, after: Callable[[], None]) -> None:
        """Run the remaining epochs; ``after`` is called after each."""
        begun, first = time.monotonic(), self.done
        while self.done < self.settings.epochs:
            passed, spent = self.done - first, time.monotonic() - begun
            left = f", about {_duration(spent / passed * (self.settings.epochs - self.done))} left" if passed else ""
            what = f"epoch {self.done + 1} of {self.settings.epochs}{left}"
            loss = self._epoch(lambda step, steps, what=what: progress(what, step, steps))  # type: ignore[misc]
            settled = self._settled(self.average)
            self.epochs.append(self._evaluated(settled).model_copy(update={"loss": loss}))
            if self.best_epoch == self.done:
                self.best = _weights(settled)
            after()

    def _epoch(self, progress: Callable[[int, int], None]) -> float:
        """Train on every image once and return the mean loss. Order and augmentation depend only on the seed and the
        epoch."""
        random = torch.Generator().manual_seed(self.settings.seed * 100_003 + self.done)
        chosen = torch.split(torch.randperm(len(self.data.images), generator=random), self.settings.batch)
        total, losses = len(chosen) * self.settings.epochs, 0.0
        self.net.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed * 100_003 + self.done)  # for random numbers in the network
            for count, some in enumerate(chosen):
                progress(count, len(chosen))
                share = (self.done * len(chosen) + count) / total
                self.plan.at(self.net, share)
                given = self.data.images[some]
                loss = self._loss(augment(given, random) if self.plan.moving else given)
                (loss / self.settings.accumulate).backward()  # type: ignore[no-untyped-call]
                losses += float(loss.detach()) * len(some)
                if (count + 1) % self.settings.accumulate == 0 or count + 1 == len(chosen):
                    self._step(share)
        return losses / len(self.data.images)

    def _loss(self, images: Tensor) -> Tensor:
        plan = self.plan
        pairs = (*plan.imitated, *plan.related) if self.data.teacher_is_original else ()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=self.settings.lower),
            recorded_outputs(self.net, (name for name, _ in pairs)) as own,
            recorded_outputs(self.data.teacher, (name for _, name in pairs)) as right,
        ):
            with torch.no_grad():
                wanted = self.data.teacher(images)
            loss = output_loss(self.net(images), wanted, logits=self.data.evaluation.logits)
        for measure, of in ((relative_error, plan.imitated), (relation_loss, plan.related)):
            parts = [measure(own[name], right[other]) for name, other in of if pairs]
            loss = loss + torch.stack(parts).mean() if parts else loss
        return loss

    def _step(self, share: float) -> None:
        """Update the weights from the accumulated gradients, and update the average."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(share) * group["faster"]
        nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        for each in self.whitened:
            each.heed()
        self.optimizer.step()
        for each in self.whitened:
            each.renew()
        self.optimizer.zero_grad(set_to_none=True)
        self.net.zero_grad(set_to_none=True)
        self.steps += 1
        kept = min(AVERAGE_DECAY, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.average.parameters()), [p.detach() for p in self.net.parameters()], 1 - kept)

    def _settled(self, net: nn.Module) -> nn.Module:
        """Return a copy as it would be folded, with BatchNorm statistics recomputed for its weights."""
        net = deepcopy(net).requires_grad_(False)
        self.plan.at(net, 1.0)
        recompute_statistics(net, torch.split(self.data.images, STATISTICS_BATCH))
        return net.eval()

    def _evaluated(self, net: nn.Module) -> Epoch:
        """Evaluate a network on the validation images."""
        tried = self.data.evaluation.tried(net, (), Budget())
        cost = tried.error if tried.divergence is None else tried.divergence
        return Epoch(cost=cost, agreement=tried.agreement, accuracy=tried.accuracy)


def _groups(plan: TrainingPlan, net: nn.Module, learnt: tuple[Whitened, ...]) -> Iterator[dict[str, Any]]:
    """Yield the parameter groups by learning rate. Matrices have weight decay; norms, biases and whitened layers do
    not."""
    inner = {each.weight: each.inner for each in learnt}
    for name, parameter in net.named_parameters():
        decay = WEIGHT_DECAY if parameter.ndim > 1 and parameter not in inner else 0.0
        learns = inner.get(parameter, parameter)
        yield {"params": [learns], "weight_decay": decay, "faster": plan.faster.get(name, 1.0)}


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions. Emulation on other CPUs is slower than float32."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)


# Saving a training between two epochs. Resuming gives the same bits as an uninterrupted training.


def save(state: State, path: Path) -> None:
    """Write a training state."""
    torch.save(state, path)


def load(path: Path) -> State:
    """Read a training state. No code in the file is executed.

    Raises:
        Refused: If it is not a training state.
    """
    try:
        found: Any = torch.load(path, weights_only=True)
        return {name: found[name] for name in ("net", "average", "best", "optimiser", "whitened", "steps")}
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise Refused(
            f"{path} is not the state of an interrupted training.",
            hint="Start from the beginning with --restart.",
            code="finetune.state",
        ) from error


def images_hash(splits: ImageSplits) -> str:
    """Return the hash of all images in order, and their classes. A training resumes only with the same images."""
    total = hashlib.sha256()
    for part in splits:
        total.update(part.images.numpy().tobytes())
        total.update(part.labels.tobytes())
    return total.hexdigest()

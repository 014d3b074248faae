"""The loop: AdamW, a warm-up and a cosine, averaged weights; of all epochs, the start included, the best is kept."""

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

from repaconv.conversion.conversion_evaluation import Judge
from repaconv.conversion.finetuning.distillation_targets import apart, moved, overheard, relations, relative
from repaconv.conversion.finetuning.trainable_batchnorm import settle
from repaconv.conversion.finetuning.training_plan import Course
from repaconv.conversion.image_splits import Parted
from repaconv.core.errors import Refused
from repaconv.core.progress import Progress
from repaconv.results import Epoch
from repaconv.verification.accuracy_budget import Budget

# --- Layers that learn in coordinates in which what they read is alike in all directions.
#
# What W^O of a conversion reads is nearly the same in most directions, and it tells small differences by large
# weights: a step that is small for every weight is large for the output, and a rate that is not lost on it teaches
# nothing else. So W = U A, where A is the inverse root of the second moments of what a layer reads at the start: U
# learns, W is used.

SEEN = 256
"""Images whose second moments are taken."""
LEAST = 1e-4
"""Of the moments' mean: what is below in a direction counts as much, or noise would be learnt from."""


class Whitened(NamedTuple):
    """A layer's weight W [o, i], the U [o, i] that learns in its place, and A [i, i]."""

    weight: nn.Parameter
    inner: nn.Parameter
    root: Tensor

    def heed(self) -> None:
        """Hand W's gradient on to U."""
        assert self.weight.grad is not None
        self.inner.grad = self.weight.grad @ self.root

    @torch.no_grad()
    def renew(self) -> None:
        """W by U as it is now."""
        self.weight.copy_(self.inner @ self.root)


@torch.no_grad()
def whitened(net: nn.Module, images: Tensor, at_once: int) -> tuple[Whitened, ...]:
    """All linear layers that the net runs on images [N, C, H, W]."""
    sums: dict[nn.Linear, Tensor] = {}

    def add(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        rows = given[0].flatten(0, -2).double()
        sums[layer] = sums.get(layer, torch.zeros((), dtype=torch.float64)) + rows.mT @ rows

    hooks = [module.register_forward_pre_hook(add) for module in net.modules() if isinstance(module, nn.Linear)]
    for some in torch.split(images[:SEEN], at_once):
        net(some)
    for hook in hooks:
        hook.remove()
    return tuple(_whitened(layer, total) for layer, total in sums.items())


def _whitened(layer: nn.Linear, moments: Tensor) -> Whitened:
    values, vectors = torch.linalg.eigh(moments / moments.diagonal().mean())
    roots = (values.clamp_min(0) + LEAST).sqrt()
    inner = layer.weight.detach().double() @ (vectors * roots) @ vectors.mT
    assert isinstance(layer.weight, nn.Parameter)
    return Whitened(layer.weight, nn.Parameter(inner.float()), ((vectors / roots) @ vectors.mT).float())


# --- The loop: AdamW, a warm-up and a cosine, averaged weights; of all epochs, the start included, the best is kept.

WEIGHT_DECAY, CLIP, WARMUP = 0.05, 1.0, 0.1
AVERAGED = 0.999
"""Of the average that is kept at every step, once there were many; it begins shorter."""
AT_ONCE = 64
"""Images in a batch that BatchNorm's statistics are taken of."""
State = dict[str, Any]


@dataclass(frozen=True)
class Pace:
    """How long and how fast.

    Attributes:
        epochs: How often each image is seen.
        batch: Images that are worked on together.
        accumulate: Batches a step.
        rate: The largest learning rate.
        seed: Of order and changes of images.
        lower: Whether products are in bfloat16.
    """

    epochs: int
    batch: int
    accumulate: int
    rate: float
    seed: int
    lower: bool

    def rate_at(self, share: float) -> float:
        """Up to the largest in a straight line, then down along a cosine."""
        if share < WARMUP:
            return self.rate * share / WARMUP
        return self.rate * (1 + math.cos(math.pi * (share - WARMUP) / (1 - WARMUP))) / 2


@dataclass(frozen=True)
class Taught:
    """What there is to learn from: the teacher, the images that fit, and those that choose, by the original."""

    teacher: nn.Module
    images: Tensor
    judge: Judge
    alike: bool  # whether the teacher is the original, whose modules can be imitated


class Training:
    """A course under way: the net, its average, and the best that was there."""

    def __init__(self, course: Course, taught: Taught, pace: Pace) -> None:
        self.course, self.taught, self.pace = course, taught, pace
        self.net = deepcopy(course.net).requires_grad_(True)  # whose tensors may be those of others
        self.average = deepcopy(course.net).requires_grad_(False)
        self.whitened = whitened(self.net, taught.images, AT_ONCE) if course.whitened else ()
        self.optimiser = torch.optim.AdamW(_groups(course, self.net, self.whitened), pace.rate, fused=True)
        self.steps = 0
        start = self._settled(self.net)
        self.best, self.epochs = _weights(start), [self._judged(start)]

    @property
    def done(self) -> int:
        """Epochs."""
        return len(self.epochs) - 1

    @property
    def kept(self) -> int:
        """The epoch that was best on the images that choose; 0 is the start."""
        return min(range(len(self.epochs)), key=lambda epoch: self.epochs[epoch].cost)

    def state(self) -> State:
        """All that the next epoch depends on."""
        return {
            "net": self.net.state_dict(),
            "average": self.average.state_dict(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
            "whitened": [each.inner.detach() for each in self.whitened],
            "steps": self.steps,
        }

    def load(self, state: State, epochs: list[Epoch]) -> None:
        """Go on from there."""
        self.net.load_state_dict(state["net"])
        self.average.load_state_dict(state["average"])
        self.optimiser.load_state_dict(state["optimiser"])
        for each, inner in zip(self.whitened, state["whitened"], strict=True):
            each.inner.data.copy_(inner)
        self.best, self.steps, self.epochs = state["best"], state["steps"], list(epochs)

    def finished(self) -> nn.Module:
        """The best net, as it will fold."""
        net = deepcopy(self.average)
        self.course.at(net, 1.0)
        net.load_state_dict(self.best)
        return net.eval()

    def started(self) -> nn.Module:
        """The start, as it would fold."""
        return self._settled(self.course.net)

    def train(self, progress: Progress, after: Callable[[], None]) -> None:
        """All epochs that are left; ``after`` each of them."""
        begun, first = time.monotonic(), self.done
        while self.done < self.pace.epochs:
            passed, spent = self.done - first, time.monotonic() - begun
            left = f", about {_told(spent / passed * (self.pace.epochs - self.done))} left" if passed else ""
            what = f"epoch {self.done + 1} of {self.pace.epochs}{left}"
            loss = self._epoch(lambda step, steps, what=what: progress(what, step, steps))  # type: ignore[misc]
            settled = self._settled(self.average)
            self.epochs.append(self._judged(settled).model_copy(update={"loss": loss}))
            if self.kept == self.done:
                self.best = _weights(settled)
            after()

    def _epoch(self, progress: Callable[[int, int], None]) -> float:
        """Every image once, in an order and moved as seed and epoch alone say; returns the mean loss."""
        random = torch.Generator().manual_seed(self.pace.seed * 100_003 + self.done)
        chosen = torch.split(torch.randperm(len(self.taught.images), generator=random), self.pace.batch)
        total, losses = len(chosen) * self.pace.epochs, 0.0
        self.net.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.pace.seed * 100_003 + self.done)  # for what draws within the net
            for count, some in enumerate(chosen):
                progress(count, len(chosen))
                share = (self.done * len(chosen) + count) / total
                self.course.at(self.net, share)
                given = self.taught.images[some]
                loss = self._loss(moved(given, random) if self.course.moving else given)
                (loss / self.pace.accumulate).backward()  # type: ignore[no-untyped-call]
                losses += float(loss.detach()) * len(some)
                if (count + 1) % self.pace.accumulate == 0 or count + 1 == len(chosen):
                    self._step(share)
        return losses / len(self.taught.images)

    def _loss(self, images: Tensor) -> Tensor:
        course = self.course
        pairs = (*course.imitated, *course.related) if self.taught.alike else ()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=self.pace.lower),
            overheard(self.net, (name for name, _ in pairs)) as own,
            overheard(self.taught.teacher, (name for _, name in pairs)) as right,
        ):
            with torch.no_grad():
                wanted = self.taught.teacher(images)
            loss = apart(self.net(images), wanted, logits=self.taught.judge.logits)
        for measure, of in ((relative, course.imitated), (relations, course.related)):
            parts = [measure(own[name], right[other]) for name, other in of if pairs]
            loss = loss + torch.stack(parts).mean() if parts else loss
        return loss

    def _step(self, share: float) -> None:
        """Learn from what was added up, and take it into the average."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.pace.rate_at(share) * group["faster"]
        nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        for each in self.whitened:
            each.heed()
        self.optimiser.step()
        for each in self.whitened:
            each.renew()
        self.optimiser.zero_grad(set_to_none=True)
        self.net.zero_grad(set_to_none=True)
        self.steps += 1
        kept = min(AVERAGED, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.average.parameters()), [p.detach() for p in self.net.parameters()], 1 - kept)

    def _settled(self, net: nn.Module) -> nn.Module:
        """A copy as it would fold, its statistics those of its own weights."""
        net = deepcopy(net).requires_grad_(False)
        self.course.at(net, 1.0)
        settle(net, torch.split(self.taught.images, AT_ONCE))
        return net.eval()

    def _judged(self, net: nn.Module) -> Epoch:
        """What the images that choose say of it."""
        tried = self.taught.judge.tried(net, (), Budget())
        cost = tried.error if tried.divergence is None else tried.divergence
        return Epoch(cost=cost, agreement=tried.agreement, accuracy=tried.accuracy)


def _groups(course: Course, net: nn.Module, learnt: tuple[Whitened, ...]) -> Iterator[dict[str, Any]]:
    """Parameters by their rate; matrices decay, norms, biases and what is whitened do not."""
    inner = {each.weight: each.inner for each in learnt}
    for name, parameter in net.named_parameters():
        decay = WEIGHT_DECAY if parameter.ndim > 1 and parameter not in inner else 0.0
        learns = inner.get(parameter, parameter)
        yield {"params": [learns], "weight_decay": decay, "faster": course.faster.get(name, 1.0)}


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def _told(seconds: float) -> str:
    """So long, in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16 itself; others would do it in steps, slower than in float32."""
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)


# --- A training between two epochs, in a file: with it the next one has the same bits as if nothing had happened.


def save(state: State, path: Path) -> None:
    """Write it."""
    torch.save(state, path)


def load(path: Path) -> State:
    """Read it back; nothing in it is run.

    Raises:
        Refused: If it is no such file.
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


def digest(parted: Parted) -> str:
    """Of all images in their order, and their classes: the same training needs the same."""
    total = hashlib.sha256()
    for part in parted:
        total.update(part.images.numpy().tobytes())
        total.update(part.labels.tobytes())
    return total.hexdigest()

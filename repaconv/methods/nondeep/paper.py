"""Rethinking ViT Depth (arXiv 2511.19718): blocks of parallel branches that join into one.

The training block at the joining factor lambda (branches b = 1..n, heads h, X normalised by a shared LayerNorm):

    A_bh = (X Wq_bh + bq_bh)(X Wk_bh + bk_bh)^T,     S_bh = softmax((A_bh + lambda sum_{b' != b} A_b'h) / D)
    x += sum_b concat_h(S_bh V_bh) Wo_b + bo_b                       output-sum, Alg. 1
    x += sum_b concat_h(S_bh (V_bh + lambda sum_{b' != b} V_b'h)) Wo_b + bo_b    value-sum, eqs. 6-7
    x += sum_b W2_b act(h_b + lambda sum_{b' != b} h_b') + b2_b,    h_b = W1_b LN2(x) + b1_b

At lambda = 1 all S_bh coincide, and so do the gelu's inputs. Then, exactly:

- the FFN is one of summed weights (eq. 1);
- the scores are one product: concat, [Q_1..Q_n][K_1..K_n]^T / D, or X W X^T with W = sum_b Wq_b Wk_b^T. The
  softmax kills what is constant along keys, so all bk vanish; bq stays, as one term per key. Which form is cheaper
  follows from the shapes; where the branches depend on each other, a thin SVD shortens the concat to its rank;
- values of an output-sum net stand side by side, [V_1..V_n] and [Wo_1; ..; Wo_n]; those of a value-sum net add up;
- bv goes into the output's bias, since softmax rows sum to 1; D goes into Wq.

Where the paper and mathematics disagree: Algorithm 1 and eqs. 6-7 are two different nets (cross terms V_A Wo_B), and
each folds only as itself; the divisor D is sqrt(1 + (n-1) lambda^2) sqrt(dh) in the text and 2 sqrt(dh) in eq. 6.
Neither stands in the weights, so the metadata must say. Absorbing LayerNorm backwards (eq. 2) is not exact;
forwards into the next linear layers, which the paper calls impossible, it is. Below lambda = 1 nothing folds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.affine import Affine
from repaconv.artefacts import Fact
from repaconv.backbones.parts import ActivationKind, activation
from repaconv.backbones.tokens import AttentionSpec, MlpSpec
from repaconv.backbones.vit import BlockSpec, DeployBlock, ViT, ViTConfig
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.errors import Refused
from repaconv.skeletons.plain import (
    BlockTraits,
    Norms,
    NormTraits,
    PlainBlock,
    PlainMlp,
    block_tensors,
    depth_of,
    fold_stem,
    fold_tail,
    folded_block,
    in_float64,
    linear_of,
    named,
    official_names,
    read_norms,
    read_skeleton,
    scale_affine,
    weight_of,
)
from repaconv.trained.activations import read_activation
from repaconv.trained.certificate import loaded, max_rel_error
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, one_of, positive, small
from repaconv.trained.preprocessing import preprocessing_of

FORMAT = "nondeep-branches-v1"


@dataclass(frozen=True)
class Join:
    """How the branches of a net join: what no tensor tells."""

    value: str  # "output-sum" or "value-sum"
    scale: str  # "sqrt" or "sum"
    factor: float = 1.0  # lambda

    def divisor(self, branches: int, head: int) -> float:
        """D, for n branches and heads of that width."""
        others = (branches - 1) * (self.factor**2 if self.scale == "sqrt" else self.factor)
        return (math.sqrt(1 + others) if self.scale == "sqrt" else 1 + others) * math.sqrt(head)

    def mix(self, parts: Tensor) -> Tensor:
        """part_b + lambda sum_{b' != b} part_b', for parts [n, ...]."""
        return parts + self.factor * (parts.sum(0) - parts)


class AttentionBranch(nn.Module):
    """The weights of one branch: qkv rows [q | k | v], head-major, and proj."""

    def __init__(self, width: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)


class BranchAttention(nn.Module):
    """Attention of n branches at lambda, as trained."""

    def __init__(self, width: int, heads: int, branches: int, join: Join, *, qkv_bias: bool) -> None:
        super().__init__()
        self.heads, self.join = heads, join
        self.divisor = join.divisor(branches, width // heads)
        self.branches = nn.ModuleList(AttentionBranch(width, qkv_bias=qkv_bias) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, self.heads, width // self.heads)
        qkv = torch.stack([branch.qkv(x).view(shape) for branch in self.branches])  # type: ignore[operator]
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)  # each [n, B, H, N, dh]
        weights = (self.join.mix(q @ k.transpose(-2, -1)) / self.divisor).softmax(-1)
        mixed = weights @ (self.join.mix(v) if self.join.value == "value-sum" else v)
        parts = mixed.transpose(2, 3).flatten(3)
        outputs = [branch.proj(part) for branch, part in zip(self.branches, parts, strict=True)]  # type: ignore[operator]
        return torch.stack(outputs).sum(0)


class BranchMlp(nn.Module):
    """The FFN of n branches at lambda, as trained."""

    def __init__(self, width: int, hidden: int, branches: int, join: Join, act: ActivationKind) -> None:
        super().__init__()
        self.join, self.act = join, activation(act)
        self.branches = nn.ModuleList(PlainMlp(width, hidden, act) for _ in range(branches))

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, N, d]."""
        h = self.join.mix(torch.stack([branch.fc1(x) for branch in self.branches]))  # type: ignore[operator]
        active = self.act(h)
        outputs = [branch.fc2(part) for branch, part in zip(self.branches, active, strict=True)]  # type: ignore[operator]
        return torch.stack(outputs).sum(0)


# --- the fold, head by head ------------------------------------------------------------------------


def thin(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """left [m, r] right [r, d] as a product of the same value over its exact rank, where that is below r.

    Only singular values that are zero to float64's rounding go: the product stays the same.
    """
    (q1, r1), (q2, r2) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, s, v = torch.linalg.svd(r1 @ r2.T)
    zero = float(s.max()) * max(left.shape[0], right.shape[1]) * torch.finfo(torch.float64).eps
    rank = max(int((s > zero).sum()), 1)
    if rank >= left.shape[1]:
        return left, right
    root = s[:rank].sqrt()
    return (q1 @ u[:, :rank]) * root, root[:, None] * (v[:rank] @ q2.T)


def side_by_side_is_cheaper(rank: int, width: int, tokens: int) -> bool:
    """Two products over ``rank`` channels against one d x d matrix: 2 N d r + N^2 r against N d^2 + N^2 d."""
    return rank * (2 * width + tokens) < width * (width + tokens)


@dataclass(frozen=True)
class FoldedScores:
    """softmax's input for all heads: rows of q (with bias) and of k, or q alone against the tokens."""

    spec: tuple[int, str]  # width of a head, "linear" or "input"
    q: Affine
    k: Tensor


def fold_scores(queries: list[Affine], keys: list[Affine], heads: int, divisor: float, tokens: int) -> FoldedScores:
    """The branches' queries and keys, all heads each, as one: concat (by rank) or X W X^T, whichever is cheaper."""
    width = queries[0].in_width
    pairs = []
    for rows in _head_rows(queries[0].out_width, heads):
        q = torch.cat([torch.cat([b.weight[rows], b.bias[rows, None]], 1) for b in queries]) / divisor  # [r, d + 1]
        k = torch.cat([b.weight[rows] for b in keys])  # bk is constant along keys
        pairs.append(thin(q.T, k))
    rank = max(right.shape[0] for _, right in pairs)
    if not side_by_side_is_cheaper(rank, width, tokens):
        whole = [(left @ right).T for left, right in pairs]  # [d, d + 1] a head: W^T and u
        stacked = torch.cat(whole)
        return FoldedScores((width, "input"), Affine(stacked[:, :-1], stacked[:, -1]), stacked.new_zeros(0, width))
    stacked = torch.cat([_padded(left.T, rank) for left, _ in pairs])
    k = torch.cat([_padded(right, rank) for _, right in pairs])
    return FoldedScores((rank, "linear"), Affine(stacked[:, :-1], stacked[:, -1]), k)


@dataclass(frozen=True)
class FoldedValues:
    """Rows of v for all heads, or none where the tokens are the values, and proj."""

    spec: tuple[int, str]
    v: Tensor
    proj: Affine


def fold_values(values: list[Affine], outputs: list[Affine], heads: int, tokens: int, *, summed: bool) -> FoldedValues:
    """The branches' values and output projections as one pair, ``summed`` for value-sum; bv goes into the bias."""
    if summed:
        values, outputs = [_total(values)], [_total(outputs)]
    width, bias = values[0].in_width, _total(outputs).bias
    for value, output in zip(values, outputs, strict=True):
        bias = bias + output.weight @ value.bias  # softmax rows sum to 1
    pairs = []
    for rows in _head_rows(values[0].out_width, heads):
        pairs.append(
            thin(torch.cat([o.weight[:, rows] for o in outputs], 1), torch.cat([v.weight[rows] for v in values]))
        )
    rank = max(right.shape[0] for _, right in pairs)
    if not side_by_side_is_cheaper(rank, width, tokens):
        proj = torch.cat([left @ right for left, right in pairs], 1)
        return FoldedValues((width, "input"), proj.new_zeros(0, width), Affine(proj, bias))
    v = torch.cat([_padded(right, rank) for _, right in pairs])
    proj = torch.cat([_padded(left.T, rank).T for left, _ in pairs], 1)
    return FoldedValues((rank, "linear"), v, Affine(proj, bias))


def _head_rows(out: int, heads: int) -> list[slice]:
    head = out // heads
    return [slice(index * head, (index + 1) * head) for index in range(heads)]


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], rows.shape[1])])


def _total(parts: list[Affine]) -> Affine:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


# --- the net ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BranchBlock:
    """One training block: its branches in attention and FFN, and what stands around them."""

    attn: int
    mlp: int
    hidden: int
    traits: BlockTraits
    qkv_bias: bool
    act: ActivationKind = "GELU"


@dataclass(frozen=True, kw_only=True)
class NonDeepReading(Reading):
    """A net of branches as trained."""

    config: ViTConfig
    heads: int
    join: Join
    blocks: tuple[BranchBlock, ...]

    def block(self, index: int) -> nn.Module:
        """Training block i."""
        width, part = self.config.width, self.blocks[index]
        attn = BranchAttention(width, self.heads, part.attn, self.join, qkv_bias=part.qkv_bias)
        return PlainBlock(self.config, attn, BranchMlp(width, part.hidden, part.mlp, self.join, part.act), part.traits)

    def module(self) -> nn.Module:
        """See `Reading`."""
        return ViT(self.config, lambda _, index: self.block(index)).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        yield fold_stem(self.tensors)
        for index, part in enumerate(self.blocks):
            prefix = f"blocks.{index}."
            spec, folded = _fold_block(self, index)
            assert isinstance(spec.mixer, AttentionSpec)
            scores = "concat" if spec.mixer.key == "linear" else "X W X^T"
            yield folded_block(
                prefix,
                lambda index=index: self.block(index),  # type: ignore[misc]
                in_float64(block_tensors(self.tensors, prefix)),
                lambda index=index: DeployBlock(self.config, index),  # type: ignore[misc]
                folded,
                (2, min(self.config.sequence, 9), self.config.width),
                told=(
                    f"{part.attn} branches' scores -> {scores}, heads {spec.mixer.qk} wide",
                    f"{part.attn} branches' values ({self.join.value}) -> heads {spec.mixer.v} wide",
                    f"{part.mlp} branches of the FFN -> their sum",
                    "bk -> nothing (softmax), bv -> proj's bias, 1 / D -> q",
                    *part.traits.told(),
                ),
                left=part.traits.left(),
                equation="eqs. 1, 6, 7" if self.join.value == "value-sum" else "eq. 1, Alg. 1",
            )
        yield fold_tail(self.config, self.tensors)


def detect(checkpoint: Checkpoint) -> Detection | None:
    """Branches are this method's alone; its layout calls itself nondeep-branches-v1."""
    found = {match[1] for name in checkpoint.tensors if (match := _BRANCH.match(name))}
    meta = checkpoint.record.get("meta")
    called = isinstance(meta, Mapping) and meta.get("format") == FORMAT
    if found:
        return Detection("training", f"branches in {len(found)} blocks" + (f", {FORMAT}" if called else ""))
    return Detection("deploy", f"{FORMAT} without branches") if called else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> NonDeepReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole net of branches, the metadata is missing or contradicts the
            tensors, or the branches have not joined (lambda is not 1).
        UsageProblem: If a setting is unknown or malformed.
    """
    form = _read(checkpoint, settings)
    if form.join.factor != 1:
        raise Refused(
            f"the branches have not joined: lambda is {form.join.factor:g}. Folding them anyway would change the "
            f"output by {_error_of_joining(form):.0%} of its size.",
            hint="Finish the training at lambda = 1; no net below it folds.",
            code="nondeep.lambda",
        )
    specs = tuple(_fold_block(form, index)[0] for index in range(len(form.blocks)))
    return replace(form, config=replace(form.config, blocks=specs))


def _read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> NonDeepReading:
    """All but the forms that the fold will choose."""
    detection = detect(checkpoint)
    if detection is None or detection.form == "deploy":
        raise Refused(
            f"{checkpoint.path} has no branches (blocks.i.attn.branches.b)"
            + (f", though it calls itself {FORMAT}: it is folded already." if detection else "."),
            hint="Fold the checkpoint as trained. Without --method the method is detected.",
            code="method.deployed" if detection else "method.mismatch",
        )
    tensors, names, unused = official_names(checkpoint)
    require_sound(tensors, names)
    meta = checkpoint.record.get("meta")
    arch, joined = (_mapping(meta, key) for key in ("arch", "join"))
    knobs = Knobs(settings)
    sizes = read_skeleton(tensors, knobs, arch, "meta.arch")
    heads = _taken(knobs, "num_heads", positive, arch.get("num_heads"), "meta.arch", "12")
    if sizes["width"] % heads:
        raise Refused(
            f"{sizes['width']} channels do not split into {heads} heads.",
            hint="Give the number that it was trained with: --set num_heads=N.",
            code="vit.heads",
        )
    if "norm_eps" not in arch and "norm_eps" not in settings:
        _taken(knobs, "norm_eps", small, None, "meta.arch", "1e-6")
    join = _read_join(tensors, joined, knobs)
    act, norms = read_activation(checkpoint.record, knobs), read_norms(tensors, knobs)
    blocks = _read_blocks(tensors, arch, norms, act)
    preprocessing = preprocessing_of(checkpoint.record, {}, knobs, sizes["image_size"])
    knobs.done()
    scaled = any(block.traits.scale1 or block.traits.scale2 for block in blocks)
    tensors.pop("join_lambda", None)
    bare = ViTConfig(**sizes, blocks=())
    form = NonDeepReading(
        backbone="vit",
        config=replace(bare, blocks=tuple(_plain_spec(bare, heads, block) for block in blocks)),
        tensors=tensors,
        names=names,
        facts=(*knobs.facts, *_block_facts(blocks), *unused),
        preprocessing=preprocessing,
        applied=("layer scale",) if scaled else (),
        heads=heads,
        join=join,
        blocks=blocks,
    )
    form.require_whole()
    return form


def _error_of_joining(form: NonDeepReading) -> float:
    """What treating lambda as 1 would do to the output, relative to its largest value, on one random image."""
    size = (1, form.config.in_channels, *form.config.image_size)
    image = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pretended = replace(form, join=replace(form.join, factor=1.0))
    with torch.no_grad():
        outputs = [loaded(one.module(), form.tensors)(image) for one in (pretended, form)]
    return max_rel_error(*outputs)


def identify(checkpoint: Checkpoint, settings: Mapping[str, str], images: Tensor, recorded: Tensor) -> dict[str, str]:
    """What the metadata does not say, from a recorded output: every variant is run, one must clearly win.

    Args:
        checkpoint: As `read` takes it.
        settings: What the user says already; it is not tried.
        images: [N, C, H, W].
        recorded: The official output on them.

    Returns:
        Settings to add.

    Raises:
        Refused: If no variant reproduces the output, or several do.
    """
    meta = checkpoint.record.get("meta")
    said = {**_mapping(meta, "arch"), **_mapping(meta, "join"), **settings}
    width = weight_of(checkpoint.tensors, "patch_embed.proj.weight", 4).shape[0]
    open_values = {
        "attn_value": ("output-sum", "value-sum"),
        "score_scale": ("sqrt", "sum"),
        "num_heads": tuple(str(heads) for heads in range(1, width + 1) if width % heads == 0),
        "norm_eps": ("1e-06", "1e-05", "1e-12"),
    }
    unknown = {name: values for name, values in open_values.items() if name not in said}
    tried: list[tuple[float, dict[str, str]]] = []
    for values in product(*unknown.values()):
        candidate = dict(zip(unknown, values, strict=True))
        form = _read(checkpoint, {**settings, **candidate})
        with torch.no_grad():
            output = loaded(form.module(), form.tensors)(images.double())
        if output.shape != recorded.shape:
            raise Refused(
                f"the recorded output has shape {list(recorded.shape)}, the network gives {list(output.shape)}.",
                hint="Take the input and output of this very checkpoint.",
                code="inputs.shape",
            )
        tried.append((max_rel_error(output, recorded.double()), candidate))
    tried.sort(key=lambda row: row[0])
    best, next_best = tried[0], tried[1] if len(tried) > 1 else (math.inf, {})
    if best[0] > 1e-5 or next_best[0] < 100 * max(best[0], 1e-15):
        differing = [name for name in unknown if best[1].get(name) != next_best[1].get(name)]
        raise Refused(
            f"the recorded output does not settle {', '.join(differing or unknown)}: the best variant misses it by "
            f"{best[0]:.1e}, the next by {next_best[0]:.1e}.",
            hint="A pair in float64 tells more; or give what is known with --set.",
            code="nondeep.identify",
        )
    return best[1]


def _fold_block(form: NonDeepReading, index: int) -> tuple[BlockSpec, dict[str, Tensor]]:
    """Block i of the deploy form: what it is, and its weights."""
    width, part = form.config.width, form.blocks[index]
    block = in_float64(block_tensors(form.tensors, f"blocks.{index}."))
    norm1 = part.traits.norm1.affine(block, "norm1", width)
    norm2 = part.traits.norm2.affine(block, "norm2", width)
    qkv = [linear_of(block, f"attn.branches.{b}.qkv") @ norm1 for b in range(part.attn)]
    queries, keys, values = ([b.rows(slice(i * width, (i + 1) * width)) for b in qkv] for i in range(3))
    outputs = [linear_of(block, f"attn.branches.{b}.proj") for b in range(part.attn)]
    tokens, divisor = form.config.sequence, form.join.divisor(part.attn, width // form.heads)
    scores = fold_scores(queries, keys, form.heads, divisor, tokens)
    mixed = fold_values(values, outputs, form.heads, tokens, summed=form.join.value == "value-sum")
    weight = torch.cat([scores.q.weight, scores.k, mixed.v])
    bias = torch.cat([scores.q.bias, weight.new_zeros(len(scores.k) + len(mixed.v))])
    fc1 = _total([linear_of(block, f"mlp.branches.{b}.fc1") for b in range(part.mlp)]) @ norm2
    fc2 = _total([linear_of(block, f"mlp.branches.{b}.fc2") for b in range(part.mlp)])
    folded = {
        "attn.qkv": Affine(weight, bias),
        "attn.proj": scale_affine(block, "ls1", width) @ mixed.proj,
        "mlp.fc1": fc1,
        "mlp.fc2": scale_affine(block, "ls2", width) @ fc2,
    }
    (qk, key), (v, value) = scores.spec, mixed.spec
    spec = replace(
        _plain_spec(form.config, form.heads, part),
        mixer=AttentionSpec(form.heads, qk, v, key, value),  # type: ignore[arg-type]
    )
    return spec, named(folded)


def published(arch: str) -> Published:
    """``6x2``: 6 layers of 2 branches; ``/3`` for 3 heads; ``+xwx`` for X W X^T whatever it costs."""
    name, _, form_name = arch.partition("+")
    sizes, _, heads_text = name.partition("/")
    depth, branches = map(int, sizes.split("x"))
    heads = int(heads_text or 12)
    form = _published_form(depth, branches, heads)
    head = form.config.width // heads
    rank = branches * head
    concat = side_by_side_is_cheaper(rank, form.config.width, form.config.sequence) and form_name != "xwx"
    mixer = AttentionSpec(heads, rank, head) if concat else AttentionSpec(heads, form.config.width, head, "input")
    deployed = replace(form.config, blocks=tuple(replace(b, mixer=mixer) for b in form.config.blocks))
    return Published(form.module, lambda: ViT(deployed), (3, *form.config.image_size))


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Seeded weights far from the identity, by the keys of nondeep-branches-v1; its metadata is `example_meta`."""
    depth, _, branches = arch.partition("x")
    form = _tiny_form() if arch == "tiny" else _published_form(int(depth), int(branches), 12)
    random = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = form.module().state_dict()
    weights = {name: _example_tensor(name, tuple(meta.shape), random) for name, meta in shapes.items()}
    return {**weights, "join_lambda": torch.tensor(1.0)}


_BRANCH = re.compile(r"^(?:blocks\.(?:\d+\.)?(\d+))\.(?:attn|mlp)\.branches\.\d+\.")


def _taken(knobs: Knobs, name: str, parse: Any, said: Any, where: str, example: str) -> Any:
    """A value of the metadata; the user must give what it leaves out."""
    return knobs.need(name, parse, example, f"the metadata does not tell {name}, and no tensor does", said, where)


def _mapping(meta: Any, key: str) -> Mapping[str, Any]:
    found = meta.get(key) if isinstance(meta, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _read_join(tensors: Mapping[str, Tensor], said: Mapping[str, Any], knobs: Knobs) -> Join:
    """attn_value, score_scale and lambda; the buffer and the metadata must agree on the last.

    Raises:
        Refused: If they do not, or the metadata names a way of joining that is not known.
    """
    for name, known in (("ffn", "pre-activation"), ("branch_reduce", "sum")):
        if said.get(name, known) != known:
            raise Refused(
                f"meta.join.{name} is {said[name]!r}; only {known!r} is known to fold.",
                hint="See the method's documentation for the ways of joining.",
                code="nondeep.join",
            )
    value = _taken(
        knobs, "attn_value", one_of("output-sum", "value-sum"), said.get("attn_value"), "meta.join", "value-sum"
    )
    scale = _taken(knobs, "score_scale", one_of("sqrt", "sum"), said.get("score_scale"), "meta.join", "sqrt")
    for name, given, known_values in (
        ("attn_value", value, ("output-sum", "value-sum")),
        ("score_scale", scale, ("sqrt", "sum")),
    ):
        if given not in known_values:
            raise Refused(
                f"meta.join.{name} is {given!r}; known are {' and '.join(known_values)}.",
                hint=f"Give the right one with --set {name}=...",
                code="nondeep.join",
            )
    told = said.get("lambda")
    found, source = (float(told), "meta.join") if isinstance(told, (int, float)) else (None, "")
    if (buffer := tensors.get("join_lambda")) is not None and buffer.numel():
        stored = [float(entry) for entry in buffer.flatten()]
        found, source = (stored[0], "join_lambda") if found is None else (found, source)
        if any(abs(entry - found) > 1e-6 for entry in stored):
            listed = ", ".join(f"{entry:g}" for entry in dict.fromkeys(stored))
            beside = "" if source == "join_lambda" else f" and {found:g} in the metadata"
            raise Refused(
                f"join_lambda is {listed} in the weights{beside}.",
                hint="A net has one lambda. Finish the training at 1 in every block, and save the checkpoint again.",
                code="nondeep.lambda",
            )
    why = "neither metadata nor weights tell lambda"
    return Join(value, scale, knobs.need("lambda", float, "1.0", why, found, source))


def _read_blocks(
    tensors: Mapping[str, Tensor], arch: Mapping[str, Any], norms: Norms, act: ActivationKind
) -> tuple[BranchBlock, ...]:
    """The branches of every block; metadata and tensors must agree on their number.

    Raises:
        Refused: If they do not, or their numbering has gaps.
    """
    blocks = []
    for index in range(depth_of(tensors)):
        block = block_tensors(tensors, f"blocks.{index}.")
        counts = {}
        for part in ("attn", "mlp"):
            found = {int(m[1]) for name in block if (m := re.match(rf"{part}\.branches\.(\d+)\.", name))}
            said = arch.get("num_branches")
            if not found or found != set(range(len(found))) or (said is not None and said != len(found)):
                listed = ", ".join(map(str, sorted(found))) or "none"
                raise Refused(
                    f"blocks.{index}.{part} has the branches {listed}"
                    + (f" where the metadata says {said}." if said is not None else "."),
                    hint="A branch is missing or too many; the sum needs all of them.",
                    code="nondeep.branches",
                )
            counts[part] = len(found)
        hidden = weight_of(tensors, f"blocks.{index}.mlp.branches.0.fc1.weight", 2).shape[0]
        traits, bias = BlockTraits.read(block, norms), "attn.branches.0.qkv.bias" in block
        blocks.append(BranchBlock(counts["attn"], counts["mlp"], hidden, traits, bias, act))
    return tuple(blocks)


def _block_facts(blocks: tuple[BranchBlock, ...]) -> list[Fact]:
    return [
        Fact(name="branches", value=sorted({count for b in blocks for count in (b.attn, b.mlp)}), source="keys"),
        Fact(name="depth", value=len(blocks), source="keys"),
        Fact(name="mlp_hidden", value=sorted({block.hidden for block in blocks}), source="shapes"),
    ]


def _plain_spec(config: ViTConfig, heads: int, block: BranchBlock) -> BlockSpec:
    head = config.width // heads
    mixer = AttentionSpec(heads, block.attn * head, head)
    return BlockSpec(mixer, MlpSpec(block.hidden, block.act), block.traits.norm1.spec, block.traits.norm2.spec)


# --- the paper's models and an example ----------------------------------------------------------------


def example_meta(**changes: Any) -> dict[str, Any]:
    """The metadata of the tiny example: value-sum, sqrt, joined."""
    arch = {"img_size": 16, "num_heads": 3, "num_branches": 2, "norm_eps": 1e-6, "global_pool": "cls"}
    join = {"lambda": 1.0, "attn_value": "value-sum", "score_scale": "sqrt", "ffn": "pre-activation"}
    meta: dict[str, Any] = {"format": FORMAT, "method": "nondeep", "arch": arch, "join": join}
    for name, value in changes.items():
        place = arch if name in arch else join
        place[name] = value
    return meta


def _form(sizes: Mapping[str, Any], depth: int, branches: int, heads: int, hidden: int) -> NonDeepReading:
    norm = NormTraits("layer", 1e-6)
    block = BranchBlock(branches, branches, hidden, BlockTraits(norm, norm, scale1=False, scale2=False), qkv_bias=True)
    bare = ViTConfig(**sizes, blocks=())
    return NonDeepReading(
        backbone="vit",
        config=replace(bare, blocks=(_plain_spec(bare, heads, block),) * depth),
        heads=heads,
        join=Join("value-sum", "sqrt"),
        blocks=(block,) * depth,
    )


def _published_form(depth: int, branches: int, heads: int) -> NonDeepReading:
    return _form({"image_size": (224, 224), "patch": 16, "width": 192, "classes": 1000}, depth, branches, heads, 768)


def _tiny_form() -> NonDeepReading:
    return _form({"image_size": (16, 16), "patch": 4, "width": 24, "classes": 5}, 2, 2, 3, 36)


def _example_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith(("bias", "cls_token", "pos_embed")):
        return 0.3 * noise
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * noise

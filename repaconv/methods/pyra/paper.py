"""PYRA (ECCV 2024, arXiv 2403.09192): token merging, modulated by what was learnt with LoRA.

The block as the official code has it, which is the specification (keys k with LoRA and bias, mean over heads):

    x += proj(softmax(q k^T / sqrt(dh) + log(size)) v)              size: tokens that a token stands for
    a, b = even and odd tokens by normalised mean keys; the r even ones nearest to an odd one go into it:
        n  = LN(z_s + z_d),   dD = 2 sigmoid(W_r^T n),   dr = 2 sigmoid(n W_D^T) - 1,   z = x size
        z_d += z_s + z_s dD dr,   x = z / size              class and distillation token are never touched
    x += mlp(norm2(x))

What folds, exactly: LoRA into qkv (`repaconv.trained.lora`); the scores' divisor into q alone, since the merging reads
k; norm1's affine into qkv, norm2's into fc1, the final norm's into the head, the two heads of a distilled net into one;
LN's affine into both generators, and 2 sigmoid(u) - 1 = tanh(u / 2) with the half into W_D. Where the class token is
read, the last block's merging is dead, and so is all that it does for other tokens but their keys and values. What
does not: the choice of tokens, sizes, dD and dr depend on the input.

Where the paper and its code differ, the code is what was trained: it merges behind the attention, splits alternately,
compares keys, and averages by size. Dropping k's bias, which plain attention allows, changes the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from repaconv.artefacts import Fact
from repaconv.backbones.merging import MergeSpec, Sized
from repaconv.backbones.parts import ActivationKind
from repaconv.backbones.tokens import AttentionSpec, MlpSpec
from repaconv.backbones.vit import BlockSpec, ViT, ViTConfig, deploy_block
from repaconv.checkpoint import Checkpoint, require_sound
from repaconv.errors import Refused
from repaconv.methods.pyra.schedules import TABLE_PATCHES, parse_schedule, scheduled
from repaconv.skeletons.plain import (
    BlockTraits,
    Norms,
    NormTraits,
    PlainBlock,
    PlainMlp,
    block_tensors,
    depth_of,
    fold_attention,
    fold_mlp,
    fold_stem,
    fold_tail,
    folded_block,
    in_float64,
    named,
    official_names,
    read_heads,
    read_norms,
    read_skeleton,
    scale_affine,
    weight_of,
)
from repaconv.trained.activations import read_activation
from repaconv.trained.contract import Detection, FoldedPart, Published, Reading
from repaconv.trained.knobs import Knobs, small
from repaconv.trained.preprocessing import preprocessing_of

MERGED_TOLERANCE = dict.fromkeys(
    ("stored", "exported", "form", "simplified", "onnx", "preprocessing", "engine", "agreement"), 1e-4
)
"""Float32 rounding passes through a normalisation and a choice in every merging block."""


PAPERS = {
    "vit-base": (768, 12, 12, 224, 16),
    "vit-large": (1024, 16, 24, 224, 16),
    "deit-base": (768, 12, 12, 224, 16),
}
"""Width, heads, depth, image side, patch."""


class KeyedAttention(nn.Module):
    """Attention as trained: weighs keys by size, and hands out the mean over heads of its keys."""

    def __init__(self, width: int, heads: int, *, qkv_bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=qkv_bias), nn.Linear(width, width)

    def forward(self, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, N, d], size [B, N, 1] -> [B, N, d] and keys [B, N, dh]."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if size is not None:
            scores = scores + size.log()[:, None, :, 0][:, :, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.proj(mixed), k.mean(1)


class PyraBlock(PlainBlock):
    """The block as trained; ``r`` tokens go, modulated where it has ``pyra_a``."""

    def __init__(self, config: ViTConfig, heads: int, block: MergingTraits, eps: float) -> None:
        attn = KeyedAttention(config.width, heads, qkv_bias=block.qkv_bias)
        super().__init__(config, attn, PlainMlp(config.width, block.hidden, block.act), block.traits)
        self.r, self.modulated, self.protected = block.r, block.modulated, len(config.tokens)
        if block.modulated:
            self.pyra_a = nn.Parameter(torch.zeros(block.r, 1))
            self.pyra_b = nn.Parameter(torch.zeros(1, config.width))
            self.pyra_norm = nn.LayerNorm(config.width, eps)

    def forward(self, state: Tensor | Sized) -> Sized:  # type: ignore[override]
        """Tokens [B, N, d], or these and sizes [B, N, 1], to tokens and sizes."""
        x, size = state if isinstance(state, tuple) else (state, None)
        mixed, keys = self.attn(self.norm1(x), size)
        x = x + self.ls1(mixed)
        if self.r:
            x, size = self.merge(x, size, keys)
        return x + self.ls2(self.mlp(self.norm2(x))), size

    def merge(self, x: Tensor, size: Tensor | None, keys: Tensor) -> Sized:
        """Bipartite soft matching, the pairs in descending order of similarity."""
        metric = keys / keys.norm(dim=-1, keepdim=True)
        scores = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)
        scores[:, 0] = -math.inf  # the class token
        if self.protected == 2:
            scores[:, :, 0] = -math.inf  # the distillation token
        best, partner = scores.max(-1)
        order = best.argsort(dim=1, descending=True, stable=True)
        source, kept = order[:, : self.r, None], order[:, self.r :].sort(1).values[..., None]
        target = partner[..., None].gather(1, source)
        size = torch.ones_like(x[..., :1]) if size is None else size
        z = x * size
        going, into = _take(z[:, ::2], source), _take(z[:, 1::2], target)
        if self.modulated:
            n = self.pyra_norm(going + into)
            by_channel = 2 * torch.sigmoid(self.pyra_a.T @ n)
            by_row = 2 * torch.sigmoid(n @ self.pyra_b.T) - 1
            going = going + going * by_channel * by_row
        z = self._ordered(_take(z[:, ::2], kept), _added(z[:, 1::2], target, going))
        onto = _added(size[:, 1::2], target, _take(size[:, ::2], source))
        sizes = self._ordered(_take(size[:, ::2], kept), onto)
        return z / sizes, sizes

    def _ordered(self, even: Tensor, odd: Tensor) -> Tensor:
        """Even tokens, then odd ones; a distillation token, odd 0, comes behind the class token."""
        if self.protected == 2:
            return torch.cat([even[:, :1], odd[:, :1], even[:, 1:], odd[:, 1:]], 1)
        return torch.cat([even, odd], 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.expand(-1, -1, x.shape[2]))


def _added(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.scatter_add(1, index.expand(-1, -1, x.shape[2]), rows)


def fold_modulation(block: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """pyra_a (W_r), pyra_b (W_D) and pyra_norm (gamma, beta) -> the generators on a LayerNorm without affine."""
    w_r, w_d = block["pyra_a"], block["pyra_b"]
    gamma, beta = block["pyra_norm.weight"], block["pyra_norm.bias"]
    return {
        "rows": w_r.T,
        "scale": gamma,
        "shift": beta * w_r.sum(),
        "channels.weight": gamma * w_d / 2,
        "channels.bias": (w_d @ beta) / 2,
    }


def _split_queries(folded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """attn.qkv as attn.q and attn.kv."""
    split = {name: w for name, w in folded.items() if not name.startswith("attn.qkv.")}
    for kind in ("weight", "bias"):
        rows = folded[f"attn.qkv.{kind}"]
        split[f"attn.q.{kind}"], split[f"attn.kv.{kind}"] = rows[: len(rows) // 3], rows[len(rows) // 3 :]
    return split


# --- the net --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergingTraits:
    """One training block: what stands around its attention and MLP, and what it merges."""

    traits: BlockTraits
    hidden: int
    qkv_bias: bool
    r: int
    modulated: bool
    act: ActivationKind = "GELU"


@dataclass(frozen=True, kw_only=True)
class PyraReading(Reading):
    """A vision transformer that may merge tokens, as trained."""

    config: ViTConfig
    heads: int
    eps: float
    blocks: tuple[MergingTraits, ...]

    def block(self, index: int) -> nn.Module:
        """Training block i."""
        return PyraBlock(self.config, self.heads, self.blocks[index], self.eps)

    def module(self) -> nn.Module:
        """See `Reading`."""
        return ViT(self.config, lambda _, index: self.block(index)).eval()

    def parts(self) -> Iterator[FoldedPart]:
        """See `Reading`."""
        yield fold_stem(self.tensors)
        width, tokens = self.config.width, self.config.sequence
        for index, part in enumerate(self.blocks):
            prefix, traits = f"blocks.{index}.", part.traits
            merge = self.config.blocks[index].merge
            block = in_float64(block_tensors(self.tensors, prefix))
            norm1, norm2 = traits.norm1.affine(block, "norm1", width), traits.norm2.affine(block, "norm2", width)
            folded = named(
                {
                    **fold_attention(block, self.heads, norm1, scale_affine(block, "ls1", width)),
                    **fold_mlp(block, norm2, scale_affine(block, "ls2", width)),
                }
            )
            told, left = ["1 / sqrt(dh) -> q"], list(traits.left())
            if self.config.blocks[index].reads:
                told.append("queries, proj and mlp -> the tokens that are read")
                folded = _split_queries(folded)
            if merge and merge.r:
                left.append(
                    f"the choice of {merge.r} tokens of {tokens}, their order and sizes: they depend on the input"
                )
            if merge and merge.modulated:
                folded |= {f"merge.modulation.{name}": w for name, w in fold_modulation(block).items()}
                told.append("pyra_norm's affine -> both generators; 2 sigmoid(u) - 1 -> tanh(u / 2)")
            if part.r and not (merge and merge.r):
                told.append("the merging -> nothing: the tokens that are read are never merged")
            tokens -= part.r
            yield _proved(self, index, folded, block, tuple(told), tuple(left))
        yield fold_tail(self.config, self.tensors)


def detect(checkpoint: Checkpoint) -> Detection | None:
    """pyra_a is this method's alone; a plain ViT with LoRA or a trainer's token_merging may be its."""
    names = checkpoint.tensors
    merging = sum(name.endswith(".pyra_a") for name in names)
    if merging:
        return Detection("training", f"pyra_a in {merging} blocks")
    plain = {"patch_embed.proj.weight", "pos_embed"} <= set(names) and any(
        name.endswith("attn.qkv.weight") for name in names
    )
    layers = checkpoint.record.get("lora_layers")
    if plain and layers:
        return Detection("training", f"LoRA on {layers} layers of a plain ViT", "possible")
    if plain and _args(checkpoint).get("token_merging") is True:
        return Detection("training", "args.token_merging on a plain ViT", "possible")
    return Detection("training", "a plain ViT, for --set schedule", "asked") if plain else None


def read(checkpoint: Checkpoint, settings: Mapping[str, str]) -> PyraReading:
    """See `repaconv.trained.contract.Method`.

    Raises:
        Refused: If the keys are not one whole vision transformer, the schedule is not known or not possible, or
            it has prompts or adapters, which do not fold.
        UsageProblem: If a setting is unknown or malformed.
    """
    detection = detect(checkpoint)
    if detection is None or (detection.confidence == "asked" and "schedule" not in settings):
        raise Refused(
            f"{checkpoint.path} has neither pyra_a nor LoRA on a plain vision transformer.",
            hint="To merge tokens in a plain one, give --set schedule=...; else leave --method out.",
            code="method.mismatch",
        )
    _require_foldable(checkpoint)
    tensors, names, unused = official_names(checkpoint)
    require_sound(tensors, names)
    knobs = Knobs(settings)
    depth, args = depth_of(tensors), _args(checkpoint)
    merges = detection.confidence == "certain" or args.get("token_merging") is True or "schedule" in settings
    sizes = read_skeleton(tensors, knobs, {}, "", resize=None if merges else "antialias")
    heads = read_heads(sizes["width"], depth, knobs, args.get("num_heads"), "args")
    eps = knobs.take("pyra_eps", small, 1e-5) if detection.confidence == "certain" else 1e-5
    schedule = _read_schedule(tensors, sizes, depth, args, knobs)
    act, norms = read_activation(checkpoint.record, knobs), read_norms(tensors, knobs)
    blocks = tuple(_read_block(tensors, i, norms, act, schedule[i]) for i in range(depth))
    preprocessing = preprocessing_of(checkpoint.record, {}, knobs, sizes["image_size"])
    knobs.done()
    scaled = any(block.traits.scale1 or block.traits.scale2 for block in blocks)
    form = PyraReading(
        backbone="vit",
        config=_config(sizes, heads, blocks, eps),
        tensors=tensors,
        names=names,
        facts=(*knobs.facts, *unused),
        preprocessing=preprocessing,
        applied=("layer scale",) if scaled else (),
        tolerances=MERGED_TOLERANCE if any(schedule) else {},
        heads=heads,
        eps=eps,
        blocks=blocks,
    )
    form.require_whole()
    return form


def published(arch: str) -> Published:
    """``vit-base`` or ``vit-large`` at 224 pixels with 16 x 16 patches, ``/low`` or ``/high`` for a schedule."""
    form = _published_form(arch)
    return Published(form.module, lambda: ViT(form.config), (3, *form.config.image_size))


def example(arch: str, seed: int) -> dict[str, Tensor]:
    """Seeded weights far from the identity, by the official keys, without LoRA."""
    form, random = _published_form(arch), torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = form.module().state_dict()
    return {name: _example_tensor(name, tuple(meta.shape), random) for name, meta in shapes.items()}


def _proved(
    form: PyraReading,
    index: int,
    folded: Mapping[str, Tensor],
    block: Mapping[str, Tensor],
    told: tuple[str, ...],
    left: tuple[str, ...],
) -> FoldedPart:
    """The block's part, proved on random tokens of various sizes.

    A block that only reads is compared on the tokens that are read.
    """
    tokens = form.config.sequence - sum(part.r for part in form.blocks[:index])
    sized = any(part.r for part in form.blocks[:index])
    read = form.config.blocks[index].reads or None

    sizes = 1 + torch.arange(tokens, dtype=torch.float64)[None, :, None].expand(2, -1, -1) % 5

    class Alone(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner((x, sizes[:, : x.shape[1]]) if sized else x)
            tokens: Tensor = out[0] if isinstance(out, tuple) else out
            return tokens[:, :read]

    part = folded_block(
        f"blocks.{index}.",
        lambda: Alone(form.block(index)),
        {f"inner.{name}": w for name, w in block.items()},
        lambda: Alone(deploy_block(form.config, index)),
        {f"inner.{name}": w for name, w in folded.items()},
        (2, tokens, form.config.width),
        told=(*told, *form.blocks[index].traits.told()),
        left=left,
        equation="eqs. 3-7",
    )
    return replace(part, tensors={f"blocks.{index}.{name}": w for name, w in folded.items()})


# --- reading ----------------------------------------------------------------------------------------------


def _args(checkpoint: Checkpoint) -> Mapping[str, Any]:
    args = checkpoint.record.get("args")
    return args if isinstance(args, Mapping) else {}


def _require_foldable(checkpoint: Checkpoint) -> None:
    for name in checkpoint.tensors:
        what = next((w for w in ("adapter.", "prefix_tokens", "visual_prompt_token") if w in name), None)
        if what:
            raise Refused(
                f"{checkpoint.names[name]} is of an adapter or a prompt, which nothing beside it can take: it does not "
                "fold.",
                hint="Only nets with LoRA, with or without token merging, are known here.",
                code="pyra.not-foldable",
            )


def _read_schedule(
    tensors: Mapping[str, Tensor], sizes: Mapping[str, Any], depth: int, args: Mapping[str, Any], knobs: Knobs
) -> tuple[int, ...]:
    """r of every block: the rows of pyra_a, else --set schedule, else the official table that args name; else none.

    Raises:
        Refused: If the rows and the user disagree, merging was on and its schedule is not known, or more tokens are
            to go than there are.
    """
    prefix, patches = len(sizes["tokens"]), sizes["image_size"][0] * sizes["image_size"][1] // sizes["patch"] ** 2
    shape = (sizes["width"], depth, prefix == 2)
    rows = {}
    for index in range(depth):
        if f"blocks.{index}.pyra_a" in tensors:
            rows[index] = weight_of(tensors, f"blocks.{index}.pyra_a", 2).shape[0]
    asked = knobs.asked("schedule", lambda text: parse_schedule(text, depth, patches, shape))
    if rows:
        schedule = tuple(rows.get(index, 0) for index in range(depth))
        if asked is not None and asked != schedule:
            raise Refused(
                f"the rows of pyra_a say {list(schedule)}, --set schedule says {list(asked)}.",
                hint="Leave --set schedule out: the rows are what was trained.",
                code="pyra.schedule",
            )
        source = "rows of pyra_a"
    elif asked is not None:
        schedule, source = asked, "--set"
    elif args.get("token_merging") is True:
        table = scheduled(str(args.get("merging_schedule")), shape) if patches == TABLE_PATCHES else None
        if table is None:
            raise Refused(
                f"args say that tokens were merged by the schedule {args.get('merging_schedule')!r}, which is a list "
                f"in the code alone; there is none for width {shape[0]}, depth {depth} and {patches} patches.",
                hint="Give it as --set schedule=16,16,... (tokens that go, block by block).",
                code="setting.needed",
            )
        schedule, source = table, f"the official table {args['merging_schedule']!r} for this width and depth, by args"
    else:
        why = "args.token_merging is off" if "token_merging" in args else "no key and no args speak of merging"
        knobs.facts.append(Fact(name="schedule", value="no merging", source=why))
        return (0,) * depth
    if not sizes["tokens"] or sizes["registers"] or sizes["pool"] not in ("token", "distilled"):
        raise Refused(
            "tokens are merged only in nets that read their class token.",
            hint="The official code knows no other.",
            code="pyra.tokens",
        )
    left = prefix + patches
    for index, r in enumerate(schedule):
        most = (left - prefix) // 2
        if r > most:
            raise Refused(
                f"block {index} merges {r} of {left} tokens, and only {most} can go.",
                hint="The schedule is that of another image size or another net.",
                code="pyra.schedule",
            )
        left -= r
    knobs.facts = [fact for fact in knobs.facts if fact.name != "schedule"]
    against = "args.token_merging is off" if source == "--set" and args.get("token_merging") is False else ""
    knobs.facts.append(Fact(name="schedule", value=list(schedule), source=source, against=against))
    return schedule


def _read_block(tensors: Mapping[str, Tensor], index: int, norms: Norms, act: ActivationKind, r: int) -> MergingTraits:
    block = block_tensors(tensors, f"blocks.{index}.")
    weight_of(tensors, f"blocks.{index}.attn.qkv.weight", 2)
    hidden = weight_of(tensors, f"blocks.{index}.mlp.fc1.weight", 2).shape[0]
    traits, modulated = BlockTraits.read(block, norms), any(name.startswith("pyra_") for name in block)
    return MergingTraits(traits, hidden, "attn.qkv.bias" in block, r, modulated, act)


def _config(sizes: Mapping[str, Any], heads: int, blocks: tuple[MergingTraits, ...], eps: float) -> ViTConfig:
    """The deploy form; the last block only reads, where class and distillation token are all that is read."""
    head, distilled = sizes["width"] // heads, len(sizes.get("tokens", ("cls_token",))) == 2
    specs, sized = [], False
    last = len(blocks) - 1 if sizes.get("pool", "token") in ("token", "distilled") else len(blocks)
    for index, block in enumerate(blocks):
        r = block.r if index < last else 0
        merge = (
            MergeSpec(r, sized, distilled, block.modulated and r > 0, eps) if index < last and (r or sized) else None
        )
        norm1, norm2, reads = (
            block.traits.norm1.spec,
            block.traits.norm2.spec,
            (2 if distilled else 1) * (index == last),
        )
        specs.append(
            BlockSpec(AttentionSpec(heads, head, head), MlpSpec(block.hidden, block.act), norm1, norm2, merge, reads)
        )
        sized = sized or r > 0
    return ViTConfig(**sizes, blocks=tuple(specs))


# --- the paper's models and an example --------------------------------------------------------------------------

_SIZES = {**PAPERS, "tiny": (24, 3, 3, 32, 8)}


def _published_form(arch: str) -> PyraReading:
    name, _, rate = arch.partition("/")
    width, heads, depth, side, patch = _SIZES[name]
    distilled = name.startswith("deit")
    schedule = (4, 3, 2) if name == "tiny" else scheduled(rate, (width, depth, distilled)) or (0,) * depth
    norm = NormTraits("layer", 1e-6)
    traits = BlockTraits(norm, norm, scale1=False, scale2=False)
    blocks = tuple(MergingTraits(traits, 4 * width, True, r, r > 0) for r in schedule)
    sizes: dict[str, Any] = {
        "image_size": (side, side),
        "patch": patch,
        "width": width,
        "classes": 5 if name == "tiny" else 100,
    }
    if distilled:
        sizes |= {"tokens": ("cls_token", "dist_token"), "pool": "distilled"}
    return PyraReading(
        backbone="vit",
        config=_config(sizes, heads, blocks, 1e-5),
        heads=heads,
        eps=1e-5,
        blocks=blocks,
    )


def _example_tensor(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=random)
    if name.endswith(("bias", "cls_token", "pos_embed", "pyra_a", "pyra_b")):
        return 0.4 * noise
    return noise / math.sqrt(math.prod(shape[1:])) if len(shape) > 1 else 1 + 0.3 * noise

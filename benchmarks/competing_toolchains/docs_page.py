"""Write docs/competing-toolchains.md from the rows: a table per CPU, and what each configuration loses."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Any

from repaconv.benchmark.machine_fingerprint import machine_key

Row = dict[str, Any]
KIND = "original"
"""Precedes the names of tools that got an original graph."""
HEAD = """# Competing toolchains

Each row is one network. All figures are speedups over the *manual baseline*: the official inference-time network,
rebuilt in `benchmarks/manual_baselines`, exported with `torch.onnx.export`, on ONNX Runtime with its defaults. Larger
is faster.

| Column | Meaning |
|---|---|
| fastest competitor, FP32 | the fastest of ONNX Runtime, OpenVINO and `torch.compile` on the manual baseline |
| ours, exact | the fastest exact configuration that `repaconv tune` measured: runtime, rewrites and settings |
| fastest competitor, lower | the fastest of OpenVINO in BF16, ONNX Runtime's quantizers, and NNCF, by default |
| best of ours, within 0.5% | also lower precision, if at most 0.5% of predictions change; `tune` chose it or not |
| chosen by tune | the fastest allowed configuration that `tune` measured in its search, and how long that took |
| ours / competitor | the two measured alone, in turn, over up to 400 session loads, with the 95% interval |

Quantizers of competitors are calibrated on the same images; whatever accuracy they lose is accepted.

One interleaved run of all configurations decides which of ours and which competitor is the fastest.

*digits* are the trained networks that are installed with repaconv; images that no step has used evaluate all of them.
The other networks have published sizes and seeded weights, which say nothing about accuracy. There a lossy
configuration of ours counts only if it lost no more than 0.5% on the trained network of its method. Rows that are not
*trusted* are marked with the verdict of the measurement. `make bench-competitors` measures again;
`benchmarks/results/competing_toolchains_methods.jsonl` has all samples.

The number after a CPU's name is its family and model: 26.2 is a Zen 5. Rows of AVX512-BF16 without a number are older,
from a CPU that took 2.3 times as long for the same graphs.

## Where the gain is small

- Ours computes what the competitor computes, in the same kernels: RIFormer, EfficientNet, RegNet-Y. Nothing folds away
  but norms and branches, there are no 3x3 convolutions of many channels (`winograd`), and three quarters of RIFormer's
  time on ONNX Runtime is what its products take at the core's peak ([distance from the limit](roofline.md)). In INT8,
  NNCF quantizes the same convolutions; ours differs by [the activations between
  them](how-to/int8.md#activations-between-convolutions).
- Rows of the five methods with AVX-512 (but PYRA and RePaViT-Base on Zen 5), and all rows with AMX, are older than
  `winograd` and the rewrites for slow kernels. Those of arbitrary networks with AVX-512 have both.
- The [rewrites for OpenVINO's layouts](rewrites.md#what-is-faster-on-openvino) are in the rows of ConvNeXt, MambaOut,
  TinyViT, DeepLabV3+ and U-Net on Zen 5. All other rows are older.
- RePaViT-Base within 0.5% on Zen 5: of 25 ms on OpenVINO (INT8 by nncf-symmetric with BF16), INT8 products take 20 ms,
  which is the core's peak for 10 billion multiply-accumulates, and attention takes 4 ms.
- PYRA and dwconv: what tokens or attention save is in the manual baseline, too. Products take 93% of PYRA's time on
  ONNX Runtime with AVX2, and would take 83% of it at the core's peak ([distance from the limit](roofline.md)).
  Strassen's algorithm, 7 products for 8, gave 1.05 on the MLPs of ViT-B and 1.09 on those of ViT-L in a trial (AVX2,
  197 tokens), 0.93 to 1.01 on smaller ones and on single layers, with weights of 7/4 the size. It is not part of
  repaconv."""
ORIGINALS = """### Arbitrary networks

Here speedups are over the *original graph* on ONNX Runtime with its defaults: what `torch.onnx.export` writes of a
network of timm, Ultralytics, segmentation_models_pytorch, spandrel or transformers, or the ONNX file of PP-OCR. Every
competing tool gets that graph, with its defaults; ours is the fastest exact configuration that `repaconv tune` finds
in 60 s, or in the time that a row names. Configurations whose outputs differ are left out, as in `tune`. In lower
precision the comparison is of speed only: weights are random but those of PP-OCR, accuracy was not evaluated, and no
row counts as within 0.5%. Ours is then the fastest of the default preset in FP32, BF16 and, by each quantizer, INT8.
`torch.compile` takes part in networks marked with *c* only. `make bench-competitors-arbitrary` measures again;
`benchmarks/results/competing_toolchains_arbitrary.jsonl` has all samples."""
BUDGET_S = 60
"""Seconds of `tune` that the page states; a row with a larger budget names it."""
LEAST = 0.98
"""Speedup over the fastest competitor below which a row counts as slower."""


def key(row: Row) -> tuple[Any, ...]:
    """CPU, network, batch size and threads of a row; also the precision if the network is an arbitrary one."""
    workload = machine_key(row["machine"]), row["net"], row["batch"], row["threads"]
    return (*workload, row["kind"]) if "kind" in row else workload


def trusted(row: Row) -> bool:
    """Whether both of its measurements are trusted."""
    return all(part["measurement"] == "trusted" for part in (row["exact"], row["lower"]) if part)


def summary_line(row: Row) -> str:
    """A row as text for the terminal."""
    words = [f"{row['net']}, batch {row['batch']}, {row['threads']} thread(s)"]
    words += [f"tuned in {row['tune']['seconds']:.0f} s"] if row.get("tune") else []
    for kind in ("exact", "lower"):
        if part := row[kind]:
            words.append(f"{kind}: {_times(row, part['ours'])} of {part['ours']} ({_configuration(row, part['ours'])})")
            words.append(f"{_times(row, part['peer'])} of {part['peer']}; ours {_interval(part['ratio'])} times that")
            words.append(f"{part['measurement']} {'; '.join(part['reasons'])}".strip())
    return "\n  ".join([*words, *(f"{name}: {why}" for name, why in row["missing"].items())])


def written(rows: list[Row], originals: Sequence[Row] = ()) -> str:
    """The page with the rows of the methods' networks and of arbitrary networks."""
    every = [*rows, *originals]
    parts = [HEAD] if every else [HEAD, "Nothing has been measured yet."]
    for machine in sorted({key(row)[0] for row in every}):
        own = [row for row in rows if key(row)[0] == machine]
        others = [row for row in originals if key(row)[0] == machine]
        parts += [f"## {machine}", _about([*own, *others])]
        for workload in sorted({key(row)[2:] for row in own}):
            there = [row for row in own if key(row)[2:] == workload]
            parts += [_heading(workload), _speed(there), *_geometric_means(there)]
        if lossy := [row for row in own if row["trained"] and row["allowed"]]:
            parts += ["### What lower precision loses", _losses(lossy)]
        parts += [ORIGINALS, *_originals(others)] if others else []
    return "\n\n".join(parts) + "\n"


def _about(rows: list[Row]) -> str:
    machine, days = rows[-1]["machine"], sorted({row["date"] for row in rows})
    versions = ", ".join(f"{name} {machine[name]}" for name in ("onnxruntime", "openvino", "torch"))
    return f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {versions}."


def _heading(workload: tuple[int, int], level: str = "###") -> str:
    batch, threads = workload
    return f"{level} Batch {batch}, {threads} thread{'s' if threads > 1 else ''}"


def _speed(rows: list[Row]) -> str:
    lower = any(row["lower"] for row in rows)
    heads = ["network", "fastest competitor, FP32", "ours, exact", "ours / competitor"]
    heads += ["fastest competitor, lower", "best of ours, within 0.5%", "ours / competitor"] if lower else []
    heads.append("chosen by tune")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["net"], *_cells(row, "exact"), *(_cells(row, "lower") if lower else []), _chosen(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _chosen(row: Row) -> str:
    """What `tune` chose, as recorded; in older rows the fastest allowed configuration of its search."""
    names = [name for name in ("ours, chosen by tune", "ours, within 0.5%", "ours, tuned") if name in row["times_hand"]]
    if not names or not row.get("tune"):
        return "not recorded"
    exact_only = names[0] == "ours, within 0.5%" and row["times_hand"]["ours, tuned"][0] > _speedup(row, names[0])
    name = "ours, tuned" if exact_only else names[0]
    return f"{_times(row, name)} {_configuration(row, name)} in {row['tune']['seconds']:.0f} s"


def _speedup(row: Row, name: str) -> float:
    return float(row["times_hand"][name][0])


def _cells(row: Row, kind: str) -> list[str]:
    """The competitor, repaconv, and the speedup of repaconv over the competitor."""
    part = row[kind]
    if not part:
        return ["-", "-", "-"]
    doubt = "" if part["measurement"] == "trusted" else f", {part['measurement']}"
    peer = f"{_times(row, part['peer'])} {part['peer'].removeprefix('hand-made, ').removeprefix(f'{KIND}, ')}"
    return [peer, f"{_times(row, part['ours'])} {_configuration(row, part['ours'])}", _interval(part["ratio"]) + doubt]


def _geometric_means(rows: list[Row]) -> list[str]:
    """Geometric mean of the FP32 speedups over the competitor: published sizes, each method counted once."""
    own = [row for row in rows if not row["trained"] and row["exact"]]
    methods: dict[str, list[float]] = {}
    for row in own:
        methods.setdefault(row["method"], []).append(log(row["exact"]["ratio"][0]))
    if len(methods) < 2:
        return []
    mean = exp(sum(sum(each) / len(each) for each in methods.values()) / len(methods))
    return [
        f"Geometric mean over {len(methods)} methods, published sizes: **{mean:.3f}x** over the fastest competitor."
    ]


def _originals(rows: list[Row]) -> list[str]:
    """The tables of arbitrary networks by batch size and threads, each with its geometric mean."""
    parts = []
    for workload in sorted({key(row)[2:4] for row in rows}):
        there = [row for row in rows if key(row)[2:4] == workload]
        exact = {row["net"]: row for row in there if row["kind"] == "fp32"}
        lower = {row["net"]: row for row in there if row["kind"] == "int8"}
        heads = ["network", "image", "fastest competitor, FP32", "ours, exact", "ours / competitor", "tuned in"]
        heads += ["fastest competitor, lower", "ours, lower", "ours / competitor"] if lower else []
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for network, row in exact.items():
            compiled = " *c*" if f"{KIND}, torch.compile" in row["times_hand"] else ""
            cells = [network + compiled, "x".join(map(str, row["size"])), *_cells(row, "exact")]
            given = "" if row["tune"]["budget_s"] <= BUDGET_S else f" of {row['tune']['budget_s']:.0f} s"
            cells.append(f"{row['tune']['seconds']:.0f} s{given}")
            cells += _cells(lower[network], "lower") if network in lower else ["-", "-", "-"] if lower else []
            lines.append(f"| {' | '.join(cells)} |")
        parts += [_heading(workload, "####"), "\n".join(lines)]
        parts.append(_mean(list(exact.values()), "exact", "FP32"))
        parts += [_mean(list(lower.values()), "lower", "Lower precision, speed only")] if lower else []
    return parts


def _mean(rows: list[Row], kind: str, called: str) -> str:
    """Geometric mean of the speedups over the competitor, and which rows are slower."""
    found = {row["net"]: row[kind]["ratio"][0] for row in rows if row[kind]}
    mean = exp(sum(map(log, found.values())) / len(found))
    slower = [network for network, ratio in found.items() if ratio < LEAST]
    named = f": {', '.join(slower)}" if slower else ""
    summary = f"{called}: geometric mean over {len(found)} networks **{mean:.3f}x** of the fastest competitor"
    why = [f"- {row['net']}: {reason}" for row in rows if row["net"] in slower and (reason := _why_slower(row))]
    return "\n".join([f"{summary}; {len(slower)} below {LEAST}{named}.", *([""] if why else []), *why])


def _why_slower(row: Row) -> str:
    """What the search found for the runtime of the fastest competitor, if that is recorded."""
    runtimes, exact = row.get("tune", {}).get("runtimes", {}), row["exact"]
    runtime = exact["peer"].removeprefix(f"{KIND}, ").lower().replace(" ", "") if exact else ""
    if not (found := runtimes.get(runtime)):
        return ""
    chosen = row["ways"][exact["ours"]]["runtime"]
    if "left" in found:
        return f"`tune` did not take {runtime}: {found['left'].removeprefix('left: ').removeprefix('skipped: ')}"
    speed = f"in the search, the speedup of {runtime} over the baseline was {_interval(found['ratio'])}"
    if chosen == runtime:
        return f"{speed}, and it was chosen"
    other = runtimes.get(chosen)
    if not (other and "ratio" in other):
        return f"{speed}, and {chosen} was chosen"
    return f"{speed}, and that of {chosen}, which was chosen, {_interval(other['ratio'])}"


def _losses(rows: list[Row]) -> str:
    """Changed top-1 predictions and accuracy per trained network: the two fastest, and all default presets."""
    lines = [
        "| network | configuration | changed top-1 predictions | accuracy | FP32 accuracy |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        right = row["losses"]["hand-made, ONNX Runtime"]["accuracy"]
        for name in [row["lower"][side] for side in ("ours", "peer")] if row["lower"] else []:
            lost, what = row["losses"][name], f"{name.removeprefix('hand-made, ')}{_named(row, name)}"
            found = f"{lost['disagreement']:.2%} of {lost['images']} | {lost['accuracy']:.2%} | {right:.2%}"
            lines.append(f"| {row['net']} | {what} | {found} |")
        configurations = "; ".join(f"{configuration} {lost:.2%}" for configuration, lost in row["allowed"].items())
        lines.append(f"| {row['net']} | ours, default presets: {configurations} | | | |")
    return "\n".join(lines)


def _named(row: Row, name: str) -> str:
    return f": {_configuration(row, name)}" if name in row["ways"] else ""


def _configuration(row: Row, name: str) -> str:
    """Runtime, precision, quantizer and BF16 layers of a deployment of repaconv."""
    deployment = row["ways"][name]
    precision = "" if deployment["precision"] == "fp32" else f" {deployment['precision']}"
    by = (
        f" by {named}" if (named := deployment.get("quantizer", deployment.get("quantiser"))) else ""
    )  # older rows have another key, or none
    rest = " with bf16" if any(each.endswith("=bf16") for each in deployment["settings"]) else ""
    return f"{deployment['runtime']}{precision}{by}{rest}"


def _times(row: Row, name: str) -> str:
    return f"{row['times_hand'][name][0]:.2f}"


def _interval(found: list[float]) -> str:
    median, low, high = found
    return f"{median:.3f} ({low:.3f} to {high:.3f})"

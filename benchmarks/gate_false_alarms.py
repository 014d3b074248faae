"""False alarms of the gate on sound models: fold, export and verify of seeded random networks of all five methods.

    python benchmarks/gate_false_alarms.py [--runs 1000] [-o result.json]

Every run has a new checkpoint and new images; methods and their small architectures alternate. Two processes run, with
one thread each.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

from repaconv.benchmark.machine_fingerprint import fingerprint
from repaconv.core import plugins
from repaconv.core.files import canonical_json

KINDS = [
    ("repavit", "tiny", {"num_heads": "3"}),
    ("repavit", "tiny-swin", {}),
    ("repavit", "tiny-mixer", {}),
    ("repavit", "tiny-poolformer", {"pool_size": "3"}),
    ("nondeep", "tiny", {}),
    ("dwconv", "tiny", {"num_heads": "3"}),
    ("pyra", "tiny", {"num_heads": "3"}),
    ("riformer", "small", {"image_size": "32"}),
]


def example(method: str, arch: str, seed: int) -> dict[str, object]:
    """Seeded weights, far from the identity."""
    from repaconv.backbones.metaformer import MetaFormerConfig

    small = MetaFormerConfig(layers=(1, 2), widths=(8, 12), hidden=(16, 30), classes=5)
    return plugins.load(plugins.METHODS, method).example(small if method == "riformer" else arch, seed)


def run(number: int) -> tuple[str, list[str]]:
    """One gate on one new net; what was no pass."""
    import torch

    import repaconv
    from repaconv.methods.nondeep.published_models import example_meta

    torch.set_num_threads(1)
    gc.set_threshold(100_000)
    method, arch, settings = KINDS[number % len(KINDS)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        meta = example_meta() if method == "nondeep" else {}
        torch.save({"state_dict": example(method, arch, number), "meta": meta}, folder / "c.pth")
        table = "".join(f'{key} = "{value}"\n' for key, value in settings.items())
        recipe = folder / "r.toml"
        recipe.write_text(f'checkpoint = "c.pth"\nout = "run"\n[set]\n{table}[verify]\nseed = {number}\n')
        report = repaconv.gate([recipe])
    wrong = [f"{c.stage} {c.name}: {c.verdict}: {c.message}" for c in report.recipes[0].checks if c.verdict != "passed"]
    return f"{method} {arch}", wrong


def main() -> None:
    """Run, count and print; write the result where asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=1000)
    options.add_argument("-o", "--out", type=Path)
    given = options.parse_args()
    runs, alarms = Counter[str](), []
    with get_context("spawn").Pool(2, maxtasksperchild=250) as pool:
        for done, (kind, wrong) in enumerate(pool.imap(run, range(given.runs)), 1):
            runs[kind] += 1
            alarms += [f"run {done - 1}, {kind}: {each}" for each in wrong]
            if done % 50 == 0:
                print(f"{done} runs, {len(alarms)} alarms", flush=True)
    for alarm in alarms:
        print(alarm)
    if given.out:
        result = {"runs": dict(runs), "alarms": alarms, "machine": fingerprint(())}
        given.out.write_text(canonical_json(result))


if __name__ == "__main__":
    main()

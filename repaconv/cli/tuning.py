"""The search for the fastest form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from repaconv.cli.options import (
    Format,
    FormatOption,
    Images,
    Quiet,
    Scheduler,
    SetOption,
    Target,
    TlsCa,
    TlsCert,
    TlsKey,
    Unverified,
    Wait,
    app,
    finish,
)
from repaconv.cli.parsing import pairs, share

if TYPE_CHECKING:
    from repaconv.artefacts import Record


@app.command(epilog="Example: repaconv tune ckpt.pth --target x86-64")
def tune(
    source: Annotated[Path | None, typer.Argument(metavar="[CKPT|RUN]", help="What to tune; the newest run.")] = None,
    target: Target = "x86-64",
    set_: SetOption = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Images a call.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of one inference.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=2, help="Of the last measurement.")] = None,
    budget: Annotated[
        float, typer.Option("--budget", min=0, help="Seconds after which only the last measurement begins.")
    ] = 600,
    max_disagreement: Annotated[
        str | None,
        typer.Option(
            "--max-disagreement", help="Also try lower precision: lossy, on at most that share of images, e.g. 0.5%."
        ),
    ] = None,
    inputs: Annotated[Path | None, typer.Option("--inputs", help="Images (.npz) to judge lower precision by.")] = None,
    images: Images = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of images, order and bootstrap.")] = 0,
    rewrites: Annotated[str | None, typer.Option("--rewrites", help="Consider no others: names with commas.")] = None,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Measure every composition in full.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Search even if the answer is known.")] = False,
    unverified: Unverified = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The result; tuned/<target>.json of the run.")] = None,
    scheduler: Scheduler = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    wait: Wait = 30,
    format: FormatOption = Format.text,
    quiet: Quiet = False,
) -> None:
    """Search the fastest exact form on the target, measured, and write it for `fold --form`.

    Searching again for the same shapes on the same machine costs nothing; a search that was broken off goes on.
    """
    from repaconv.pipeline import tune as stage

    def run(*, progress: Any) -> Record:
        measurer = None
        if scheduler:
            from repaconv.farm.cluster import Tls
            from repaconv.farm.tuning import on_workers

            measurer = on_workers(
                scheduler,
                target=target,
                threads=threads,
                batch=batch,
                seed=seed,
                tls=Tls(tls_ca, tls_cert, tls_key),
                wait_s=wait,
                progress=progress,
            )
        return stage(
            source,
            target=target,
            settings=pairs(set_, "--set"),
            batch=batch,
            threads=threads,
            rounds=rounds,
            budget_s=budget,
            max_disagreement=None if max_disagreement is None else share(max_disagreement, "--max-disagreement"),
            inputs=inputs,
            images=images,
            seed=seed,
            rewrites=rewrites.split(",") if rewrites else None,
            exhaustive=exhaustive,
            again=again,
            measurer=measurer,
            where=scheduler or "",
            unverified=unverified,
            out=out,
            progress=progress,
        )

    finish("tune", format, quiet, run)

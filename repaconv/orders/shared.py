"""Knobs that several orders have, each with its type and its words once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from repaconv.orders.knobs import Knob
from repaconv.orders.texts import SETTINGS, SIZE

Target = Annotated[str, Knob("A target's name, or the path of a .toml.")]
Images = Annotated[str | Path | None, Knob("A folder of images, or of one folder a class.")]
Classes = Annotated[str | Path | None, Knob("Class names, one a line, where the folders' order is another.")]
Unverified = Annotated[bool, Knob("Go on behind a failed verdict, and record it.")]
Settings = Annotated[
    Mapping[str, str] | None,
    Knob("What the file does not tell.", option=("--set",), metavar="NAME=VALUE", text=SETTINGS),
]
Weights = Annotated[str | None, Knob("Which set of the file, e.g. model_ema.")]
Sha256 = Annotated[str | None, Knob("The file's SHA-256: another file is refused.", metavar="HEX")]
Checkpoint = Annotated[str | Path | None, Knob("Where the checkpoint is now.")]
OfTheRun = Annotated[str, Knob("Which of the run's ONNX models: fp32, fp16, bf16 or int8; on a GPU also tf32.")]
ImagesACall = Annotated[int | None, Knob("Images a call; the target's if left out.", least=1)]
Deployed = Annotated[str | Path | None, Knob("Of the run's ONNX models; tune's file brings runtime and settings.")]
Threads = Annotated[int | None, Knob("Of one inference; the target's if left out.", least=1)]
Workspace = Annotated[int | None, Knob("MiB that TensorRT's kernels may take.", option=("--workspace",), least=1)]
Seed = Annotated[int, Knob("Of images, order and bootstrap.", least=0)]
AcceptInconclusive = Annotated[bool, Knob("Write a baseline even of an inconclusive measurement.", recorded=False)]
Scheduler = Annotated[str | None, Knob("Of a Dask cluster with workers of the target.", metavar="tcp://HOST:PORT")]
TlsCa = Annotated[Path | None, Knob("The cluster's certificate authority.", recorded=False)]
TlsCert = Annotated[Path | None, Knob("This machine's certificate.", recorded=False)]
TlsKey = Annotated[Path | None, Knob("Its key.", recorded=False)]
Again = Annotated[bool, Knob("Run every step, also those that stand: of which nothing has changed.")]
Arch = Annotated[
    str | None,
    Knob("What builds the network: timm:NAME, torchvision:NAME, or FILE.py:FUNCTION, which is then run."),
]
ImageSize = Annotated[int | tuple[int, int] | None, Knob("Of the images: N or HEIGHTxWIDTH.", text=SIZE)]
Against = Annotated[str | Path | None, Knob("Another .onnx or engine, not the training form.")]
Rounds = Annotated[int | None, Knob("Measured, interleaved rounds; the target's at least, if left out.", least=2)]

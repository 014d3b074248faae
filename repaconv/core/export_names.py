"""What an export is, and what it and all that is made of it is called in a run."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import PurePath
from shlex import quote
from typing import Literal

from repaconv.results import ExportArtefact, FoldArtefact, ImageSize, Record

LONGEST = 40
"""Letters of the patterns in a file's name."""
USUAL_TARGET, USUAL_FORM, USUAL_PRECISION = "x86-64", "default", "fp32"


class Variant(Record):
    """What tells an export from the others of its run, which lie beside it.

    ``image_size`` is None where the network takes it as it comes: free if it can be, else its own; so is a ``batch``
    that is dynamic. ``form`` and ``opset`` are None where they are the target's own. ``fp32_modules`` are the patterns
    by which a lower precision keeps layers in FP32.
    """

    target: str = USUAL_TARGET
    form: str | None = None
    opset: int | None = None
    precision: str = USUAL_PRECISION
    fp32_modules: tuple[str, ...] = ()
    batch: int | Literal["dynamic"] = "dynamic"
    image_size: ImageSize | None = None
    preprocessing: bool = False

    @classmethod
    def of(cls, exported: ExportArtefact, folded: FoldArtefact) -> Variant:
        """That of an export of this fold."""
        return cls(
            target=exported.target,
            form=cls.form_of(exported.preset),
            opset=exported.chosen_opset,
            precision=exported.precision,
            fp32_modules=exported.fp32_modules,
            batch="dynamic" if exported.batch == folded.batch else exported.batch,
            image_size=unusual(exported.image_size, folded),
            preprocessing=exported.preprocessing,
        )

    @staticmethod
    def form_of(form: str) -> str | None:
        """A fold's form as a variant has it."""
        return None if form == USUAL_FORM else PurePath(form).stem

    @property
    def full(self) -> str:
        """Its name with the target always in it, as engines and measurements have it: ``x86-64.int8``."""
        return ".".join([self.target, *self._unusual()])

    @property
    def name(self) -> str:
        """Its name without what is usual, as graphs have it: ``int8``, ``jetson-nano.b1``; empty if all is usual."""
        return ".".join(self._unusual()) if self.target == USUAL_TARGET else self.full

    def _unusual(self) -> list[str]:
        form = [] if self.form is None else ["form-" + re.sub(r"[^\w@+-]", "_", self.form)]
        opset = [] if self.opset is None else [f"opset{self.opset}"]
        precision = [] if self.precision == USUAL_PRECISION else [self.precision]
        kept = [f"keep-{_in_a_name('+'.join(self.fp32_modules))}"] if self.fp32_modules else []
        batch = [] if self.batch == "dynamic" else [f"b{self.batch}"]
        size = [] if self.image_size is None else ["x".join(map(str, self.image_size))]
        return [*form, *opset, *precision, *kept, *batch, *size, *(["pixels"] if self.preprocessing else [])]

    @property
    def training(self) -> Variant:
        """That of the training form beside it, which has neither form nor precision of its own."""
        plain = {"form": None, "precision": USUAL_PRECISION, "fp32_modules": (), "preprocessing": False}
        return self.model_copy(update=plain)

    @property
    def options(self) -> str:
        """How `export` is asked for it."""
        words = ["--target", self.target]
        words += ["--opset", str(self.opset)] if self.opset else []
        words += ["--precision", self.precision] if self.precision != USUAL_PRECISION else []
        words += [word for each in self.fp32_modules for word in ("--keep-fp32", quote(each))]
        words += ["--batch", str(self.batch)] if self.batch != "dynamic" else []
        words += ["--image-size", "x".join(map(str, self.image_size))] if self.image_size else []
        return " ".join([*words, *(["--with-preprocessing"] if self.preprocessing else [])])


def _in_a_name(text: str) -> str:
    """What a file may be called: the text, or its beginning and a hash where that is not all of it."""
    plain = re.sub(r"[^\w+-]", "_", text)[:LONGEST]
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:6]}"


def unusual(size: ImageSize | Literal["dynamic"] | None, folded: FoldArtefact) -> ImageSize | None:
    """A size as a variant has it."""
    return None if size == "dynamic" or size == usual_size(folded) else size


def usual_size(folded: FoldArtefact) -> ImageSize | Literal["dynamic"] | None:
    """The size of images for which a graph is exported where none is asked for; None where it takes none."""
    return "dynamic" if folded.any_image_size else folded.image_size


def dotted(name: str) -> str:
    """As it stands in a file's name, behind what the file is."""
    return f".{name}" if name else ""

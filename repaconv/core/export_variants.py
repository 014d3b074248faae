"""Which export of a run is meant, and the names of its files: target, precision, batch size, image size."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import PurePath
from shlex import quote
from typing import Literal

from repaconv.results import ExportArtefact, FoldArtefact, ImageSize, Record

MAX_PATTERN_LENGTH = 40
"""Maximum number of characters of the layer patterns in a file name."""
DEFAULT_TARGET, DEFAULT_PRESET, DEFAULT_PRECISION = "x86-64", "default", "fp32"


class Variant(Record):
    """The options that distinguish an export from the others of the same run.

    ``image_size`` is None for the default: dynamic if the network supports it, otherwise the network's own size.
    ``form`` (the rewrite preset) and ``opset`` are None for the target's own. ``fp32_modules`` are the patterns of the
    layers that are kept in FP32 in a lower precision.
    """

    target: str = DEFAULT_TARGET
    form: str | None = None
    opset: int | None = None
    precision: str = DEFAULT_PRECISION
    fp32_modules: tuple[str, ...] = ()
    batch: int | Literal["dynamic"] = "dynamic"
    image_size: ImageSize | None = None
    preprocessing: bool = False

    @classmethod
    def of(cls, exported: ExportArtefact, folded: FoldArtefact) -> Variant:
        """Return the variant of an export of this fold."""
        return cls(
            target=exported.target,
            form=cls.form_of(exported.preset),
            opset=exported.chosen_opset,
            precision=exported.precision,
            fp32_modules=exported.fp32_modules,
            batch="dynamic" if exported.batch == folded.batch else exported.batch,
            image_size=image_size_of_variant(exported.image_size, folded),
            preprocessing=exported.preprocessing,
        )

    @staticmethod
    def form_of(form: str) -> str | None:
        """Return a rewrite preset as a variant stores it: None for the default, a file's stem otherwise."""
        return None if form == DEFAULT_PRESET else PurePath(form).stem

    @property
    def full(self) -> str:
        """Its name including the target, as in the names of engines and measurements: ``x86-64.int8``."""
        return ".".join([self.target, *self._unusual()])

    @property
    def name(self) -> str:
        """Its name without the defaults, as in the names of ONNX models: ``int8``, ``jetson-nano.b1``; empty for all
        defaults."""
        return ".".join(self._unusual()) if self.target == DEFAULT_TARGET else self.full

    def _unusual(self) -> list[str]:
        form = [] if self.form is None else ["form-" + re.sub(r"[^\w@+-]", "_", self.form)]
        opset = [] if self.opset is None else [f"opset{self.opset}"]
        precision = [] if self.precision == DEFAULT_PRECISION else [self.precision]
        kept = [f"keep-{_file_name_part('+'.join(self.fp32_modules))}"] if self.fp32_modules else []
        batch = [] if self.batch == "dynamic" else [f"b{self.batch}"]
        size = [] if self.image_size is None else ["x".join(map(str, self.image_size))]
        return [*form, *opset, *precision, *kept, *batch, *size, *(["pixels"] if self.preprocessing else [])]

    @property
    def training(self) -> Variant:
        """The variant of the training-time network exported for comparison: neither preset nor precision."""
        plain = {"form": None, "precision": DEFAULT_PRECISION, "fp32_modules": (), "preprocessing": False}
        return self.model_copy(update=plain)

    @property
    def options(self) -> str:
        """The options of `export` that produce it."""
        words = ["--target", self.target]
        words += ["--opset", str(self.opset)] if self.opset else []
        words += ["--precision", self.precision] if self.precision != DEFAULT_PRECISION else []
        words += [word for each in self.fp32_modules for word in ("--keep-fp32", quote(each))]
        words += ["--batch", str(self.batch)] if self.batch != "dynamic" else []
        words += ["--image-size", "x".join(map(str, self.image_size))] if self.image_size else []
        return " ".join([*words, *(["--with-preprocessing"] if self.preprocessing else [])])


def _file_name_part(text: str) -> str:
    """Return the text as part of a file name: shortened and followed by a hash if long or with other characters."""
    plain = re.sub(r"[^\w+-]", "_", text)[:MAX_PATTERN_LENGTH]
    return plain if plain == text else f"{plain}-{sha256(text.encode()).hexdigest()[:6]}"


def image_size_of_variant(size: ImageSize | Literal["dynamic"] | None, folded: FoldArtefact) -> ImageSize | None:
    """Return an image size as a variant stores it: None for the default."""
    return None if size == "dynamic" or size == default_image_size(folded) else size


def default_image_size(folded: FoldArtefact) -> ImageSize | Literal["dynamic"] | None:
    """Return the image size of an export for which none was requested; None if the network takes no images."""
    return "dynamic" if folded.any_image_size else folded.image_size


def dotted(name: str) -> str:
    """Return the name with a leading dot, as it follows the stem of a file name; empty if there is no name."""
    return f".{name}" if name else ""

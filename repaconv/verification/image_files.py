"""Read image files, apply the network's preprocessing, and read class labels from folder names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from repaconv.core.errors import Refused, RepaconvError, UsageProblem, describe_exception, did_you_mean, unreadable
from repaconv.core.toml_positions import text_of_file, why_unreadable
from repaconv.results import Preprocessing

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
"""Formats that Pillow may decode, whatever the file's suffix: for some others Pillow runs external programs."""
NO_SCORES = "the network has no classes: no output is their scores, of shape [images, classes]"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def image_files(folder: Path, limit: int | None = None) -> list[Path]:
    """List the images of a folder and its subfolders, sorted by path; at most ``limit`` of them, evenly spread.

    Raises:
        Refused: There are none.
    """
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        missing = f"{folder} is a file, not a folder." if folder.exists() else f"there is no folder {folder}."
        raise Refused(
            f"{folder} holds no images." if folder.is_dir() else missing,
            hint=f"Give a folder with {', '.join(SUFFIXES[:3])} ... files, or one folder of them for each class.",
            code="images.none",
        )
    if limit is None or limit >= len(found):
        return found
    return [found[place * len(found) // limit] for place in range(limit)]


def read_image(path: Path, wanted: Preprocessing, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Decode an image, resize it and crop its center: [H, W, C] in uint8, RGB or gray.

    The arithmetic is that of torchvision's Resize and CenterCrop on Pillow images, which papers evaluate with.

    Args:
        path: The file.
        wanted: The preprocessing.
        size: (height, width) of the crop.
        channels: 3, or 1 for gray.

    Raises:
        Refused: The image cannot be read, has more than 8 bits per channel, or is smaller than the crop after resizing.
    """
    with _opened(path) as image:
        if image.mode[0] in "IF":  # Pillow would clip the values instead of scaling them
            raise Refused(
                f"{path} has more than 8 bits per channel (mode {image.mode}), and their scale is unknown.",
                hint="Save the images with 8 bits, as the network was trained on them.",
                code="images.depth",
            )
        pixels = np.asarray(_cropped(image.convert("RGB" if channels == 3 else "L"), wanted, size))
    return pixels.reshape(*size, channels)


def image_size(path: Path) -> tuple[int, int]:
    """The (width, height) of an image file.

    Raises:
        Refused: The image cannot be read.
    """
    with _opened(path) as image:
        return image.size


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            yield image
    except RepaconvError:
        raise
    except PermissionError as error:
        raise unreadable(path) from error
    except Exception as error:  # Pillow raises whatever its decoders meet
        raise Refused(
            f"{path} is not a readable image: {describe_exception(error)}.",
            hint="Take it out of the folder.",
            code="images.unreadable",
        ) from error


def _cropped(image: Image.Image, wanted: Preprocessing, size: tuple[int, int]) -> Image.Image:
    from PIL.Image import Resampling

    height, width = size
    (across, down), (left, top) = frame(image.size, wanted, size)
    if across < width or down < height:
        raise Refused(
            f"an image of {image.height} x {image.width} is resized to {down} x {across}, less than the crop "
            f"{height} x {width}.",
            hint="Give fold --set resize_edge=, or another image size.",
            code="images.crop",
        )
    resized = image.resize((across, down), Resampling[wanted.interpolation.upper()])
    return resized.crop((left, top, left + width, top + height))


Frame = tuple[tuple[int, int], tuple[int, int]]


def frame(given: tuple[int, int], wanted: Preprocessing, size: tuple[int, int]) -> Frame:
    """How an image of (width, height) ``given`` becomes one of (height, width) ``size``: its (width, height) after
    resizing, and (left, top) of the crop."""
    across, down = _size_before_crop(given, wanted, size)
    return (across, down), (round((across - size[1]) / 2), round((down - size[0]) / 2))


def _size_before_crop(given: tuple[int, int], wanted: Preprocessing, size: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) after resizing and before the crop, for an image of (width, height) ``given``."""
    edge = wanted.resize_edge or max(size)
    if not wanted.keep_ratio:
        return (edge, edge) if wanted.resize_edge else (size[1], size[0])
    longer = int(edge * max(given) / min(given))
    return (edge, longer) if given[0] <= given[1] else (longer, edge)


def preprocessing_text(wanted: Preprocessing, size: tuple[int, int], channels: int | None = None) -> str:
    """Describe the preprocessing and where it comes from, of a network with so many channels, if that is known."""
    edge = wanted.resize_edge or (max(size) if wanted.keep_ratio else f"{size[0]} x {size[1]}")
    colored = channels in (None, 3)
    assumed = ", ".join(name for name in wanted.assumed if colored or name != "channel_order")
    order = wanted.channel_order if colored else "gray" if channels == 1 else f"{channels} channels"
    return (
        f"{'shorter edge' if wanted.keep_ratio else 'both edges'} to {edge} ({wanted.interpolation}), "
        f"center crop {size[0]} x {size[1]}, "
        f"{order}, mean {_joined(wanted.mean)}, std {_joined(wanted.std)}; from {wanted.source}"
        f"{f'; assumed, since the file does not have it: {assumed}' if assumed else ''}"
    )


def _joined(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def prepared(pixels: NDArray[np.uint8], wanted: Preprocessing) -> NDArray[np.float32]:
    """Normalize pixels [n, H, W, C] in uint8 to (pixels - mean) / std, [n, C, H, W] in float32, RGB or BGR."""
    if wanted.channel_order == "BGR" and pixels.shape[3] == 3:
        pixels = pixels[:, :, :, ::-1]
    mean, std = (np.asarray(values, dtype=np.float32) for values in (wanted.mean, wanted.std))
    scaled = (pixels.astype(np.float32) - mean) / std
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


@dataclass(frozen=True)
class Labels:
    """The class labels of images.

    Attributes:
        of_images: Class of each image [n], -1 where it is unknown; None if there are no labels.
        source: Where the labels come from, or why there are none.
    """

    of_images: NDArray[np.int64] | None
    source: str

    @classmethod
    def of(cls, folder: Path, files: list[Path], classes: int, class_names: Path | None) -> Labels:
        """Read labels from the names of the subfolders that hold the images.

        The class numbers come from the list of class names, if one is given; else from folder names that are numbers;
        else from the alphabetical order of the folders, as in ImageFolder, if there is one folder per class.

        Args:
            folder: The folder of the class folders.
            files: The images to label.
            classes: Number of classes of the network; 0 if it has none.
            class_names: A file with one class name per line, in the order of the classes.

        Raises:
            Refused: Images are two folders deep, so that the outer folders may be splits, not classes.
            UsageProblem: The list of class names cannot be read, has the wrong length or lacks a folder's name, or it
                is needed since the folder names are numbers that ImageFolder would sort differently.
        """
        places = [path.relative_to(folder).parts for path in image_files(folder)]
        names = sorted({parts[0] for parts in places if len(parts) > 1})
        if not names:
            return cls(None, "no labels: the images lie in no folders named by class")
        if not classes:
            return cls(None, f"no labels: {NO_SCORES}")
        if deep := next((parts for parts in places if len(parts) > 2), None):
            raise Refused(
                f"{folder} holds images two folders deep ({'/'.join(deep)}): which of them are the classes?",
                hint=f"Give one folder that holds the classes' folders, e.g. {folder / deep[0]}.",
                code="images.nested",
            )
        if class_names is not None:
            index = _class_numbers(class_names, classes, names)
            source = f"folder names, in the order of {class_names.name}"
        elif _are_numbers(names, classes) and all(int(name) < classes for name in names):
            index, source = {name: int(name) for name in names}, "folder names, which are class numbers"
        elif len(names) == classes:
            index, source = {name: place for place, name in enumerate(names)}, "folder names, in alphabetical order"
        else:
            return cls(None, f"no labels: {len(names)} folders for {classes} classes; give --classes FILE")
        known = [index.get(path.relative_to(folder).parts[0], -1) for path in files]
        return cls(np.asarray(known, dtype=np.int64), source)


def _are_numbers(names: list[str], classes: int) -> bool:
    """Whether all folder names are numbers.

    Raises:
        UsageProblem: They are, but their numerical order may differ from their order as text.
    """
    if not all(name.isdecimal() for name in names):
        return False
    widths = {len(name) for name in names}
    if len(widths) > 1 or min(widths) < len(str(classes - 1)):
        raise UsageProblem(
            f"the folders {', '.join(names[:3])} ... are numbers of {classes} classes, and ImageFolder, which sorts "
            "them as text, has them in another order.",
            hint="Give --classes FILE: one folder name per line, in the order of the network's classes.",
            code="classes",
        )
    return True


def _class_numbers(path: Path, classes: int, folders: list[str]) -> dict[str, int]:
    """The class of each name in a file.

    Raises:
        UsageProblem: The file cannot be read, has the wrong number of names, or lacks that of a folder.
    """
    try:
        names = text_of_file(path, "utf-8-sig").split("\n")  # Windows editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(
            f"{path} cannot be read: {why_unreadable(error)}.", hint="Write one class name per line.", code="classes"
        ) from error
    names = [name.strip() for name in names if name.strip()]
    if len(names) != classes or len(set(names)) != classes:
        raise UsageProblem(
            f"{path} has {len(set(names))} class names, the network {classes} classes.",
            hint="Write one name per line, in the order of the classes.",
            code="classes",
        )
    if unknown := [name for name in folders if name not in names]:
        raise UsageProblem(
            f"{path} has no class {unknown[0]}, and there is a folder of that name.",
            hint=f"{did_you_mean(unknown[0], names)}Give folders the names of classes, and take others away.",
            code="classes",
        )
    return {name: place for place, name in enumerate(names)}

"""Labels of tasks other than classes: COCO annotations, masks, and arrays of an .npz."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from repaconv.core.errors import Refused, describe_exception
from repaconv.core.files import parse_json
from repaconv.core.toml_positions import text_of_file
from repaconv.tasks.contract import Array
from repaconv.tasks.detection import Labeled


class CocoImage(NamedTuple):
    """One image of a COCO file: its name, its (width, height) in pixels, 0 if unknown, and its objects."""

    name: str
    size: tuple[int, int]
    objects: Labeled


def coco_images(path: Path) -> list[CocoImage]:
    """The images of a COCO file of bounding boxes, in its order.

    Raises:
        Refused: It is none.
    """
    try:
        found = parse_json(text_of_file(path))
        numbers = [each["id"] for each in found["categories"]]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two categories have one id")
        categories = {int(each["id"]): str(each.get("name", "")) for each in found["categories"]}
        objects: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in found["images"]}
        for each in found["annotations"]:
            objects[each["image_id"]].append(each)
        return [
            CocoImage(
                str(image["file_name"]),
                (int(image.get("width", 0)), int(image.get("height", 0))),
                _labeled(objects[image["id"]], categories),
            )
            for image in found["images"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Refused(
            f"{path} is no COCO file of bounding boxes: {describe_exception(error)}.",
            hint="It needs images (id, file_name), annotations (image_id, category_id, bbox) and categories (id).",
            code="labels.unreadable",
        ) from error


def _labeled(annotations: list[dict[str, Any]], categories: dict[int, str]) -> Labeled:
    boxes = np.asarray([each["bbox"] for each in annotations], float).reshape(-1, 4)
    if len(boxes) != len(annotations) or not np.isfinite(boxes).all() or (boxes[:, 2:] < 0).any():
        raise ValueError("a bbox is not x, y, width and height, all finite and the last two not negative")
    boxes[:, 2:] += boxes[:, :2]
    ids = np.asarray([each["category_id"] for each in annotations], int)
    if unknown := set(ids.tolist()) - set(categories):
        raise ValueError(f"an annotation has the category {min(unknown)}, which is not among the categories")
    crowd = np.asarray([bool(each.get("iscrowd")) for each in annotations], bool)
    return Labeled(boxes, ids, crowd, categories)


def mask_files(folder: Path) -> list[Path]:
    """The masks of a folder, sorted by path.

    Raises:
        Refused: There are none.
    """
    found = sorted(folder.rglob("*.png")) if folder.is_dir() else []
    if not found:
        raise Refused(
            f"{folder} holds no masks.",
            hint="Give a folder of .png files, one for each image, whose pixels are class numbers.",
            code="labels.unreadable",
        )
    return found


def read_mask(path: Path) -> Any:
    """A mask as a Pillow image of class numbers.

    Raises:
        Refused: It is no image of one channel.
    """
    from PIL import Image

    try:
        image = Image.open(path, formats=("PNG",))
        image.load()
    except Exception as error:  # Pillow raises whatever its decoder meets
        raise Refused(
            f"{path} is not a readable image: {describe_exception(error)}.",
            hint="Give masks as .png.",
            code="labels.unreadable",
        ) from error
    if image.mode not in ("L", "P", "I", "I;16", "1"):
        raise Refused(
            f"{path} is a picture in colors (mode {image.mode}), not a mask of class numbers.",
            hint="Save masks with one channel: the number of the class, 255 for pixels that do not count.",
            code="labels.unreadable",
        )
    return image


def label_array(path: Path) -> Array:
    """The array ``labels`` of an .npz.

    Raises:
        Refused: There is none.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")  # some devices never end
        with np.load(path, allow_pickle=False) as archive:
            found = np.asarray(archive["labels"])
            if not found.ndim:
                raise ValueError("it is one number")
            return found
    except Exception as error:  # numpy and zipfile raise many classes
        raise Refused(
            f"{path} has no array 'labels': {describe_exception(error)}.",
            hint="Save it with numpy.savez(path, labels=array), one row for each image.",
            code="labels.unreadable",
        ) from error

"""``python docs/_pictures.py`` draws docs/img/fold-<method>.svg: what each method folds in the model that is shipped.

tests/test_fold_picture.py compares the files with what this draws.
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).parent / "img"


def pictures() -> dict[str, str]:
    """All of them, by the name of the file."""
    from repaconv import models
    from repaconv.stages.inspect.stage import draw_fold

    shipped = sorted(Path(models.__file__).parent.glob("*.pth"))
    return {f"fold-{path.stem}.svg": draw_fold(path) for path in shipped}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture)

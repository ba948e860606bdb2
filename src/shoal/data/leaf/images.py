"""LEAF's CelebA: JSON files with the names of images."""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.data.dataset import Data, Scaling
from shoal.data.leaf.decoding import Flaws, Rows, conversion_only, decode_leaf, leaf_data, leaf_folder
from shoal.data.leaf.json_reader import shorten
from shoal.data.leaf.vectors import class_labels
from shoal.errors import DataError


@dataclass(frozen=True)
class Celeba:
    """LEAF's CelebA (2018): does a celebrity smile? Faces of 9,343 people, 3×84×84, 2 classes.

    The JSON files hold the names of images. The images are in the folder `images` and are resized as LEAF does.
    """

    path: Path | None = None
    images: Path | None = None
    """The folder of images; by default img_align_celeba beside train and test, or in raw beside them."""
    missing: Literal["error", "skip"] = "error"
    """What to do about a missing image: raise an error, or leave the sample out and report the count."""

    SIDE = 84

    def load(self, seed: int) -> Data:
        images = self._image_folder()
        convert = functools.partial(_faces, images, self.SIDE, self.missing == "skip")
        arrays = decode_leaf("celeba", self.path, conversion_only(convert), key=self.missing, sources=[images])
        return leaf_data(arrays, classes=2, scaling=Scaling())

    def _image_folder(self) -> Path:
        folder = leaf_folder("celeba", self.path)
        defaults = [
            folder / "img_align_celeba",
            folder / "raw" / "img_align_celeba",
            folder.parent / "raw" / "img_align_celeba",
        ]
        candidates = [self.images] if self.images else defaults
        images = next((candidate for candidate in candidates if candidate.is_dir()), None)
        if images is None:
            raise DataError(
                f"dataset 'celeba': no folder of images: looked for {', '.join(map(str, candidates))}; unpack "
                "img_align_celeba.zip there, or set dataset.images"
            )
        return images


def _faces(images: Path, side: int, skip: bool, x: list[Any], y: list[Any], flaws: Flaws) -> Rows:
    """Convert names of images to bytes (3, side, side)."""
    from PIL import Image

    labels = class_labels(y, 2)
    rows = np.empty((len(x), 3, side, side), dtype=np.uint8)
    present = np.ones(len(x), dtype=bool)
    for number, name in enumerate(x):
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"sample {number} is {shorten(name)}; expected the name of an image")
        try:
            with Image.open(images / name) as image:
                rows[number] = np.asarray(image.resize((side, side)).convert("RGB")).transpose(2, 0, 1)
        except FileNotFoundError as error:
            if not skip:
                raise ValueError(
                    f"the image of sample {number}, {images / name}, is missing; add it, or leave such samples "
                    "out with dataset.missing = 'skip'"
                ) from error
            present[number] = False
            flaws["missing"] += 1
        except (OSError, EOFError, SyntaxError, MemoryError, zlib.error, struct.error,
                Image.DecompressionBombError) as error:  # fmt: skip
            raise ValueError(f"the image of sample {number}, {images / name}, cannot be read: {error}") from error
    return rows[present], labels[present]

"""Any data set of Hugging Face: by name from the hub, or from a folder.

Lhoest et al. 2021, "Datasets: A Community Library for Natural Language Processing". Needs the optional extra:
pip install 'shoal[huggingface]'. A folder was written by `save_to_disk`, or has parquet, csv or json files whose
names start with the split. The data set is decoded once; then neither the network nor the extra is needed. No code of a
data set is run.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shoal.data.dataset import Data, Samples, Scaling
from shoal.data.decoded import Arrays, cache_folder, load_decoded
from shoal.data.npy_writer import NpyWriter
from shoal.errors import DataError
from shoal.randomness import generator
from shoal.types import Bounds

VERSION = 1
BATCH = 256
FIRST_WITHOUT_SCRIPTS = 4
"""The first major version of the library that does not run loading scripts of data sets."""
WORD = re.compile(r"[\w']+|[^\w\s]")

Kind: TypeAlias = Literal["image", "text", "numbers"]


@dataclass(frozen=True)
class HuggingFace:
    """Any data set of Hugging Face's hub or format (2021), by name or path; needs pip install 'shoal[huggingface]'.

    Images become bytes (channels, height, width), scaled to 0–1. Texts become the numbers of their first `length`
    words. There are `vocabulary` such numbers: 0 is padding, 1 is any other word, and the others are the most frequent
    words of the training set. Numbers and lists of numbers become float32. Integer and string targets are
    classes; others are numbers.
    """

    dataset: str | None = None
    """The name on the hub, such as "ylecun/mnist"."""
    path: Path | None = None
    """A folder, in place of a name."""
    configuration: str | None = None
    revision: str | None = None
    """A commit of the data set on the hub; by default the newest at the first use."""
    train: str = "train"
    test: str | None = "test"
    """The names of the splits. Without a test split, `test_fraction` of the training split is the test set."""
    test_fraction: Annotated[float, Bounds(above=0, below=1)] = 0.2
    input: str | None = None
    """The column of inputs; by default "image", "img", "text" or "sentence", or the only column left."""
    target: str = "label"
    owner: str | None = None
    """The column with the user of each sample."""
    kind: Kind | None = None
    """The kind of inputs, if the column does not show it."""
    size: tuple[Annotated[int, Bounds(at_least=1)], Annotated[int, Bounds(at_least=1)]] | None = None
    """Height and width that images are resized to; required if images differ in size."""
    vocabulary: Annotated[int, Bounds(at_least=3)] = 10_000
    length: Annotated[int, Bounds(at_least=1)] = 64

    def __post_init__(self) -> None:
        if (self.dataset is None) == (self.path is None):
            raise ValueError("set either dataset, a name on Hugging Face's hub, or path, a folder")

    def load(self, seed: int) -> Data:
        if self.path is not None and not self.path.is_dir():
            raise DataError(f"dataset 'huggingface': there is no folder {self.path}")
        sources = [] if self.path is None else [file for file in self.path.rglob("*") if file.is_file()]
        arrays = load_decoded(f"huggingface-{self._key()}", VERSION, sources, self._decode)
        classes, tokens = arrays["facts"].tolist()
        train, test = (
            Samples(arrays[f"x_{split}"], arrays[f"y_{split}"], arrays.get(f"owner_{split}"))
            for split in ("train", "test")
        )
        image = train.x.dtype == np.uint8
        return Data(
            train, test, max(1, classes), "classification" if classes else "regression",
            Scaling() if image else None, (tokens,) if tokens else (),
        )  # fmt: skip

    def _key(self) -> str:
        """Return a hash of all options, which distinguishes data sets from the same files or with the same name."""
        options = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "path"]
        return hashlib.sha256(repr(options).encode()).hexdigest()[:12]

    @property
    def _place(self) -> str:
        return f"dataset 'huggingface': {self.dataset or self.path}"

    def _decode(self, folder: Path) -> Arrays:
        train, test = self._splits()
        column = self._input_column(train)
        kind = self.kind or _kind(train, column, self._place)
        arrays: Arrays = {}
        tokens = 0
        convert: Callable[[list[Any]], NDArray[Any]]
        if kind == "text":
            numbers = self._number_words(train, column)
            tokens = len(numbers) + 2
            convert = self._texts(numbers)
        else:
            convert = self._images if kind == "image" else _numbers
        targets, classes = self._targets(train, test)
        owners: dict[Any, int] = {}
        for split, rows, y in (("train", train, targets[0]), ("test", test, targets[1])):
            with NpyWriter(folder / f"x_{split}.npy") as inputs:
                for start in range(0, len(rows), BATCH):
                    try:
                        inputs.append(convert(rows[start : start + BATCH][column]))
                    except (ValueError, TypeError, OSError) as error:
                        raise DataError(
                            f"{self._place}: {split} samples {start} to {start + BATCH - 1}, column {column!r}: {error}"
                        ) from error
            arrays[f"y_{split}"] = y
            if self.owner is not None:
                whose = self._column(rows, self.owner)
                arrays[f"owner_{split}"] = np.array([owners.setdefault(o, len(owners)) for o in whose], dtype=np.int64)
        arrays["facts"] = np.array([classes, tokens], dtype=np.int64)
        return arrays

    def _splits(self) -> tuple[Any, Any]:
        """Return the training and the test split, as objects of the library."""
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"{self._place}: needs the library 'datasets', which is not installed; pip install 'shoal[huggingface]'"
            ) from error
        if int(datasets.__version__.partition(".")[0]) < FIRST_WITHOUT_SCRIPTS:
            raise DataError(
                f"{self._place}: version {datasets.__version__} of the library 'datasets' may run code of a data "
                f"set; expected {FIRST_WITHOUT_SCRIPTS} or newer; pip install 'shoal[huggingface]'"
            )
        try:
            if self.path is not None and any(self.path.glob("dataset_dict.json")):
                found = datasets.load_from_disk(str(self.path))
            elif self.path is not None and any(self.path.glob("state.json")):
                found = datasets.DatasetDict({self.train: datasets.load_from_disk(str(self.path))})
            elif self.path is not None:
                cache = str(cache_folder().parent / "huggingface")
                found = datasets.load_dataset(str(self.path), self.configuration, cache_dir=cache)
            else:
                found = datasets.load_dataset(self.dataset, self.configuration, revision=self.revision)
        except Exception as error:  # the library may raise anything, and so may the network
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{self._place}: cannot be loaded: {reason}; without a network, set dataset.path to a folder "
                "that save_to_disk wrote"
            ) from error
        if self.train not in found:
            raise DataError(f"{self._place}: no split {self.train!r}; it has {', '.join(map(repr, found))}")
        train = found[self.train]
        if self.test is not None and self.test in found:
            test = found[self.test]
        elif self.test in (None, "test"):
            order = generator(0, "huggingface test samples").permutation(len(train))
            count = round(len(train) * self.test_fraction)
            train, test = train.select(np.sort(order[count:])), train.select(np.sort(order[:count]))
        else:
            raise DataError(f"{self._place}: no split {self.test!r}; it has {', '.join(map(repr, found))}")
        if not len(train) or not len(test):
            raise DataError(f"{self._place}: {len(train)} training and {len(test)} test samples; expected some in each")
        return train, test

    def _column(self, rows: Any, name: str) -> list[Any]:
        if name not in rows.column_names:
            raise DataError(f"{self._place}: no column {name!r}; it has {', '.join(map(repr, rows.column_names))}")
        return list(rows[name])

    def _input_column(self, rows: Any) -> str:
        others = [name for name in rows.column_names if name not in (self.target, self.owner)]
        likely = [name for name in ("image", "img", "text", "sentence") if name in others]
        found = self.input or (likely[0] if likely else others[0] if len(others) == 1 else None)
        if found is None or found not in rows.column_names:
            names = ", ".join(map(repr, rows.column_names))
            raise DataError(f"{self._place}: no column {found!r} of inputs; set dataset.input to one of {names}")
        return found

    def _targets(self, train: Any, test: Any) -> tuple[list[NDArray[Any]], int]:
        """Return the targets of both splits and the number of classes; 0 classes for a regression."""
        both = [self._column(rows, self.target) for rows in (train, test)]
        for split, targets in zip(("train", "test"), both, strict=True):
            for number, target in enumerate(targets):
                if not isinstance(target, int | float | str) or target != target:
                    raise DataError(f"{self._place}: {split} sample {number}: {self.target} is {target!r}")
        names = getattr(train.features.get(self.target), "names", None)
        if all(isinstance(target, str) for targets in both for target in targets):
            numbers = {name: number for number, name in enumerate(sorted({*both[0], *both[1]}))}
            return [np.array([numbers[t] for t in targets], dtype=np.int64) for targets in both], max(2, len(numbers))
        if any(isinstance(target, str) for targets in both for target in targets):
            raise DataError(f"{self._place}: {self.target} mixes strings and numbers")
        if any(isinstance(target, float) for targets in both for target in targets):
            return [np.array(targets, dtype=np.float32) for targets in both], 0
        arrays = [np.array(targets, dtype=np.int64) for targets in both]
        classes = len(names) if names else 1 + int(max(a.max() for a in arrays))
        for split, array in zip(("train", "test"), arrays, strict=True):
            wrong = np.flatnonzero((array < 0) | (array >= classes))
            if len(wrong):
                raise DataError(
                    f"{self._place}: {split} sample {wrong[0]}: {self.target} is {array[wrong[0]]}; expected 0 to "
                    f"{classes - 1}"
                )
        return arrays, max(2, classes)

    def _number_words(self, rows: Any, column: str) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for start in range(0, len(rows), BATCH):
            for text in rows[start : start + BATCH][column]:
                counts.update(WORD.findall(str(text).lower()))
        ranked = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[: self.vocabulary - 2]
        return {word: number for number, (word, _) in enumerate(ranked, start=2)}

    def _texts(self, numbers: dict[str, int]) -> Callable[[list[Any]], NDArray[Any]]:
        def convert(texts: list[Any]) -> NDArray[Any]:
            rows = np.zeros((len(texts), self.length), dtype=np.int32)
            for row, text in zip(rows, texts, strict=True):
                if not isinstance(text, str):
                    raise ValueError(f"{text!r}; expected a string")
                kept = [numbers.get(word, 1) for word in WORD.findall(text.lower())[: self.length]]
                row[: len(kept)] = kept
            return rows

        return convert

    def _images(self, images: list[Any]) -> NDArray[Any]:
        from PIL import Image

        rows = []
        for image in images:
            if not isinstance(image, Image.Image):
                image = Image.fromarray(np.asarray(image, dtype=np.uint8))
            if image.mode not in ("L", "RGB"):
                image = image.convert("RGB")
            if self.size is not None:
                image = image.resize(self.size[::-1])
            pixels = np.asarray(image)
            rows.append(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        if len({row.shape for row in rows}) > 1:
            raise ValueError("images differ in size or channels; set dataset.size = [height, width]")
        return np.stack(rows)


def _kind(rows: Any, column: str, place: str) -> Kind:
    feature = rows.features[column]
    if type(feature).__name__ == "Image":
        return "image"
    if getattr(feature, "dtype", "") in ("string", "large_string"):
        return "text"
    if isinstance(rows[0][column], int | float | list):
        return "numbers"
    raise DataError(f"{place}: column {column!r} is {feature}; set dataset.kind to 'image', 'text' or 'numbers'")


def _numbers(values: list[Any]) -> NDArray[np.float32]:
    rows = np.array(values, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise ValueError("some values are not finite numbers")
    return rows[:, None] if rows.ndim == 1 else rows

"""A table of published data sets: their files, URLs and checksums.

Shoal does not ship them. `shoal data fetch` downloads them; `shoal data verify` compares local files with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import DataError
from shoal.schema import nearest


@dataclass(frozen=True)
class PublishedFile:
    """One published file."""

    name: str
    url: str
    size: int
    """In bytes."""
    md5: str | None
    """None if the publisher gives none, because the file changes from time to time."""
    other_names: tuple[str, ...] = ()
    """Other names or patterns of the same data: unpacked, or packed differently."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """The md5 of each part of the contents, as `Publisher.reader` reads them; independent of the packing."""


@dataclass(frozen=True)
class Publisher:
    """How to get a data set."""

    folder: str
    """Its folder below SHOAL_DATA."""
    files: tuple[PublishedFile, ...] = ()
    reader: str | None = None
    """`module:function` that yields (name, md5) of each part of a file's contents."""
    description: str | None = None
    """`module:function` that reads a whole file and describes it, if its contents have no published md5."""
    system_folders: tuple[Path, ...] = ()
    """Folders in which a package of the operating system installs the files."""
    instructions: str = ""
    """What to do if there is nothing to download. Continues with "into" and a folder."""


TORONTO = "https://www.cs.toronto.edu/~kriz"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
GROUPLENS = "https://files.grouplens.org/datasets/movielens"


def _idx(base: str, stem: str, size: int, md5: str, unpacked: str) -> PublishedFile:
    """Return a gzipped idx file. Unpacked, some copies have a dot in the name."""
    other_names = (stem, f"{stem.replace('-idx', '.idx')}*")
    return PublishedFile(f"{stem}.gz", f"{base}/{stem}.gz", size, md5, other_names, {stem: unpacked})


def _tars(*stems: str) -> tuple[str, ...]:
    """Return the names of a tar with any compression. Patterns match whole names: similar files hold other formats."""
    return tuple(f"{stem}{ending}" for stem in stems for ending in (".tar", ".tar.*", ".tgz"))


def _leaf(name: str) -> Publisher:
    return Publisher(
        name,
        instructions=f"LEAF generates it with its own scripts: clone https://github.com/TalwalkarLab/leaf, run "
        f"'./preprocess.sh -s niid --sf 1.0 -k 0 -t sample' in data/{name.removeprefix('leaf-')}, and copy the folders "
        f"data/train and data/test that the script writes",
    )


PUBLISHERS: dict[str, Publisher] = {
    "cifar10": Publisher(
        "cifar-10",
        (
            PublishedFile(
                "cifar-10-python.tar.gz",
                f"{TORONTO}/cifar-10-python.tar.gz",
                170_498_071,
                "c58f30108f718f92721af3b95e74349a",
                (*_tars("cifar-10-python", "cifar-10-batches-py", "cifar-10"), "cifar-10-batches-py", "data_batch_1"),
                {  # of the records in the binary version: a label and 3,072 pixels, one byte each
                    "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
                    "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
                    "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
                    "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
                    "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
                    "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
                },
            ),
        ),
        reader="shoal.data.cifar:records",
    ),
    "cifar100": Publisher(
        "cifar-100",
        (
            PublishedFile(
                "cifar-100-python.tar.gz",
                f"{TORONTO}/cifar-100-python.tar.gz",
                169_001_437,
                "eb9058c3a382ffc7106e4002c42a8d85",
                (*_tars("cifar-100-python", "cifar-100"), "cifar-100-python", "train"),
                {  # of the pickles themselves
                    "train": "16019d7e3df5f24257cddd939b257f8d",
                    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
                },
            ),
        ),
        reader="shoal.data.cifar:pickles",
    ),
    "mnist": Publisher(
        "mnist",
        (
            _idx(MNIST, "train-images-idx3-ubyte", 9_912_422,
                 "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
            _idx(MNIST, "train-labels-idx1-ubyte", 28_881,
                 "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
            _idx(MNIST, "t10k-images-idx3-ubyte", 1_648_877,
                 "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
            _idx(MNIST, "t10k-labels-idx1-ubyte", 4_542,
                 "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
        ),
        reader="shoal.data.idx:unpacked",
    ),
    "fashion-mnist": Publisher(
        "fashion-mnist",
        (
            _idx(ZALANDO, "train-images-idx3-ubyte", 26_421_880,
                 "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
            _idx(ZALANDO, "train-labels-idx1-ubyte", 29_515,
                 "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
            _idx(ZALANDO, "t10k-images-idx3-ubyte", 4_422_102,
                 "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
            _idx(ZALANDO, "t10k-labels-idx1-ubyte", 5_148,
                 "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
        ),
        reader="shoal.data.idx:unpacked",
        system_folders=(Path("/usr/share/datasets/fashion-mnist"),),  # Debian's package dataset-fashion-mnist
    ),
    "movielens": Publisher(
        "movielens",
        (
            PublishedFile(
                "ml-latest-small.zip",
                f"{GROUPLENS}/ml-latest-small.zip",
                978_202,
                None,  # GroupLens updates it
                ("ml-latest-small", "ratings.csv"),
            ),
        ),
        description="shoal.data.movielens:latest_small",
    ),
    "movielens-100k": Publisher(
        "movielens",
        (
            PublishedFile(
                "ml-100k.zip",
                f"{GROUPLENS}/ml-100k.zip",
                4_924_029,
                "0e33842e24a9c977be4e0107933c0723",
                ("ml-100k", "u.data"),
            ),
        ),
        description="shoal.data.movielens:hundred_thousand",
    ),
    "femnist": _leaf("femnist"),
    "celeba": _leaf("celeba"),
    "shakespeare": _leaf("shakespeare"),
    "sent140": _leaf("sent140"),
    "reddit": _leaf("reddit"),
    "leaf-synthetic": _leaf("leaf-synthetic"),
}  # fmt: skip
"""By the name of the data set. A data set with several versions has a name for each."""


def publisher(dataset: str) -> Publisher:
    """Return the publisher of a data set. Raises `DataError` if it is unknown or has none."""
    if dataset in PUBLISHERS:
        return PUBLISHERS[dataset]
    from shoal.data import DATASETS

    if dataset in DATASETS:
        raise DataError(f"dataset {dataset!r} has no publisher: there is nothing to fetch or verify")
    raise DataError(f"unknown dataset {dataset!r}{nearest(dataset, PUBLISHERS)}")

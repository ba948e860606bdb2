"""Data sets, partitions and augmentations. Each is listed here by name, and imported only when an experiment uses it.

May import the foundations only. Importing this package imports neither torch nor a data set.
"""

from __future__ import annotations

from shoal.data.dataset import (
    Augmentation,
    Data,
    Dataset,
    Indices,
    LocalData,
    OwnerPartition,
    Partition,
    Rescaling,
    Samples,
    Scaling,
    Shift,
    ShiftingPartition,
    Task,
)

DATASETS: dict[str, str] = {
    "cifar10": "shoal.data.cifar:Cifar10",
    "cifar100": "shoal.data.cifar:Cifar100",
    "mnist": "shoal.data.idx:Mnist",
    "fashion-mnist": "shoal.data.idx:FashionMnist",
    "digits": "shoal.data.digits:Digits",
    "synthetic": "shoal.data.synthetic:Synthetic",
    "femnist": "shoal.data.leaf:Femnist",
    "celeba": "shoal.data.leaf:Celeba",
    "shakespeare": "shoal.data.leaf:Shakespeare",
    "sent140": "shoal.data.leaf:Sent140",
    "reddit": "shoal.data.leaf:Reddit",
    "leaf-synthetic": "shoal.data.leaf:LeafSynthetic",
    "movielens": "shoal.data.movielens:Movielens",
    "huggingface": "shoal.data.huggingface:HuggingFace",
    "arrays": "shoal.data.arrays:ArrayFiles",
}

PARTITIONS: dict[str, str] = {
    "iid": "shoal.data.partitions:Iid",
    "shards": "shoal.data.partitions:Shards",
    "dirichlet": "shoal.data.partitions:Dirichlet",
    "classes": "shoal.data.partitions:Classes",
    "quantity": "shoal.data.partitions:Quantity",
    "natural": "shoal.data.partitions:Natural",
    "rotation": "shoal.data.shifts:Rotation",
    "noise": "shoal.data.shifts:Noise",
}

AUGMENTATIONS: dict[str, str] = {
    "crop": "shoal.data.augmentations:Crop",
    "flip": "shoal.data.augmentations:Flip",
    "cutout": "shoal.data.augmentations:Cutout",
    "normalize": "shoal.data.augmentations:Normalize",
}

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "Augmentation",
    "Data",
    "Dataset",
    "Indices",
    "LocalData",
    "OwnerPartition",
    "Partition",
    "Rescaling",
    "Samples",
    "Scaling",
    "Shift",
    "ShiftingPartition",
    "Task",
]

"""Models: the networks that nodes train, and the view of a module as one flat vector (`shoal.models.flat`).

May import the foundations and `data`. The registry lists models by name and imports a model, and torch, on first use.
"""

from __future__ import annotations

from shoal.models.model import Model

MODELS: dict[str, str] = {
    "mlp": "shoal.models.basic:Mlp",
    "logistic": "shoal.models.basic:Logistic",
    "gn-lenet": "shoal.models.basic:GnLenet",
    "lenet": "shoal.models.images:Lenet",
    "leaf-cnn": "shoal.models.images:LeafCnn",
    "lstm": "shoal.models.sequences:Lstm",
    "matrix-factorization": "shoal.models.factorization:MatrixFactorization",
    "resnet8": "shoal.models.resnets:Resnet8",
    "resnet18": "shoal.models.resnets:Resnet18",
    "transformer": "shoal.models.sequences:Transformer",
    "huggingface": "shoal.models.huggingface:HuggingFace",
}

__all__ = ["MODELS", "Model"]

"""Models: the networks nodes train, and the view of a network as one flat vector (`shoal.models.flat`).

Each is named here, and imported, with PyTorch, only when an experiment asks for it.
"""

from __future__ import annotations

from shoal.models.model import Model

MODELS: dict[str, str] = {
    "mlp": "shoal.models.networks:Mlp",
    "logistic": "shoal.models.networks:Logistic",
    "gn-lenet": "shoal.models.networks:GnLenet",
}

__all__ = ["MODELS", "Model"]

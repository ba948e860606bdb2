"""How nodes train: torch networks, or other people's training code behind the same contract."""

from __future__ import annotations

from shoal.training.factory import BatchTrainer, Ground, Trainers, Workshop

TRAINERS: dict[str, str] = {
    "torch": "shoal.training.torch_factory:Networks",
    "scikit": "shoal.training.scikit:Scikit",
    "flower": "shoal.training.flower:Flower",
}

__all__ = ["TRAINERS", "BatchTrainer", "Ground", "Trainers", "Workshop"]

"""How nodes train: torch networks, or other people's training code behind the same contract."""

from __future__ import annotations

from shoal.training.factory import BatchTrainer, TrainerBackend, TrainerFactory, TrainerInputs

TRAINERS: dict[str, str] = {
    "torch": "shoal.training.torch_factory:TorchBackend",
    "scikit": "shoal.training.scikit:ScikitBackend",
    "flower": "shoal.training.flower:FlowerBackend",
}

__all__ = ["TRAINERS", "BatchTrainer", "TrainerBackend", "TrainerFactory", "TrainerInputs"]

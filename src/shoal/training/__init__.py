"""How nodes train: settings, the trainer contract, torch modules, and other training code behind the same contract.

May import the foundations, `data` and `models`; knows nothing of engines. Importing this package does not import torch.
"""

from __future__ import annotations

from shoal.training.batch_trainer import BatchTrainer
from shoal.training.factory import TrainerBackend, TrainerFactory, reject_unused_settings
from shoal.training.inputs import TrainerInputs
from shoal.training.settings import Training
from shoal.training.trainer import BatchableTrainer, Trained, Trainer

TRAINERS: dict[str, str] = {
    "torch": "shoal.training.torch_factory:TorchBackend",
    "scikit": "shoal.training.scikit:ScikitBackend",
    "flower": "shoal.training.flower:FlowerBackend",
}

__all__ = [
    "TRAINERS",
    "BatchTrainer",
    "BatchableTrainer",
    "Trained",
    "Trainer",
    "TrainerBackend",
    "TrainerFactory",
    "TrainerInputs",
    "Training",
    "reject_unused_settings",
]

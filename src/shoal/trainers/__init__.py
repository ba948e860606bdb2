"""How nodes train: torch networks, or other people's training code behind the same contract."""

from __future__ import annotations

from shoal.trainers.workshop import BatchTrainer, Ground, Trainers, Workshop

TRAINERS: dict[str, str] = {
    "torch": "shoal.trainers.networks:Networks",
    "scikit": "shoal.trainers.scikit:Scikit",
    "flower": "shoal.trainers.flower:Flower",
}

__all__ = ["TRAINERS", "BatchTrainer", "Ground", "Trainers", "Workshop"]

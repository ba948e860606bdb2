"""How nodes train: torch networks, or other people's training code behind the same contract."""

from __future__ import annotations

from shoal.trainers.workshop import Ground, Trainers, Workshop

TRAINERS: dict[str, str] = {
    "torch": "shoal.trainers.networks:Networks",
}

__all__ = ["TRAINERS", "Ground", "Trainers", "Workshop"]

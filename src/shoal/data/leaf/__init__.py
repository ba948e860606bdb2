"""The data sets of LEAF, a benchmark for federated settings, with samples by user (Caldas et al. 2018).

A data set with its own conversion of samples belongs here; imports nothing of Shoal but `data` and the foundations.
"""

from __future__ import annotations

from shoal.data.leaf.images import Celeba
from shoal.data.leaf.text import Reddit, Sent140, Shakespeare
from shoal.data.leaf.vectors import Femnist, LeafSynthetic

__all__ = ["Celeba", "Femnist", "LeafSynthetic", "Reddit", "Sent140", "Shakespeare"]

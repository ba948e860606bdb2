"""The model of the paper: a small network with dropout, for the 8×8 images of `digits`."""

from __future__ import annotations

from torch import Tensor, nn


class DropoutNet(nn.Module):
    """One hidden layer, with dropout after it."""

    def __init__(self, hidden: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs

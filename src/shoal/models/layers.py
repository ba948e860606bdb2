"""Layers that torch does not provide, for networks that are not a plain sequence of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A residual block: ReLU of the sum of `path` and `shortcut`."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class Recurrent(nn.Module):
    """An embedding, stacked LSTMs and a head.

    `head_input` selects the input of the head: the "last" state, "each" state separately, or the ReLU of "all" states
    concatenated.
    """

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int, head: nn.Module, head_input: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = head
        self._head_input = head_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x.long()))
        if self._head_input == "last":
            states = states[:, -1]
        elif self._head_input == "all":
            states = F.relu(states.flatten(1))
        out: torch.Tensor = self.head(states)
        return out


class Factors(nn.Module):
    """Predict a rating as the dot product of a user vector and an item vector."""

    def __init__(self, users: int, items: int, factors: int, spread: float) -> None:
        super().__init__()
        self.users = nn.Embedding(users, factors)
        self.items = nn.Embedding(items, factors)
        for table in (self.users, self.items):
            nn.init.uniform_(table.weight, -spread, spread)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.long()
        ratings: torch.Tensor = (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)
        return ratings


class CausalTransformer(nn.Module):
    """Predict the next token at each position or, with `last_only`, the class of the text at the last position."""

    def __init__(
        self,
        tokens: int,
        length: int,
        outputs: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        last_only: bool,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[AttentionBlock(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs, bias=False)
        self._last_only = last_only
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.blocks(self.dropout(self.tokens(x.long()) + self.positions[: x.shape[1]]))
        if self._last_only:
            states = states[:, -1]
        out: torch.Tensor = self.head(self.norm(states))
        return out


class AttentionBlock(nn.Module):
    """Causal self-attention and an MLP, each with layer normalisation and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        projected = self.attention(self.attention_norm(x)).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        # Not torch's fused kernel: it does not support `vmap`, and small models gain more from `vmap`.
        scores = query @ key.transpose(-2, -1) / (width // self._heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        attended = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.projection(attended))
        out: torch.Tensor = x + self.dropout(self.mlp(x))
        return out


class Logits(nn.Module):
    """A Hugging Face model that maps a batch of inputs to logits."""

    def __init__(self, model: nn.Module, padding: int | None, images: bool) -> None:
        super().__init__()
        self.model = model
        self._padding = padding
        self._images = images

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._forward(x).logits
        return out

    def _forward(self, x: torch.Tensor) -> Any:
        if self._images:
            return self.model(pixel_values=x)
        ids = x.long()
        mask = torch.ones_like(ids) if self._padding is None else (ids != self._padding).long()
        return self.model(input_ids=ids, attention_mask=mask)

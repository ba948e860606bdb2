"""Matrix factorisation: ratings as dot products of user and item vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.dataset import Data


@dataclass(frozen=True)
class MatrixFactorization:
    """A rating as the dot product of a user vector and an item vector, without biases (Koren, Bell & Volinsky 2009).

    Initial values are drawn from U(−`spread`, `spread`). (610 + 9,724) × 20 = 206,680 parameters for MovieLens
    ml-latest-small.
    """

    factors: Annotated[int, Bounds(at_least=1)] = 20
    spread: Annotated[float, Bounds(above=0)] = 0.05

    def build_for(self, data: Data) -> nn.Module:
        from shoal.models.layers import Factors

        if data.shape != (2,) or len(data.sizes) != 2:
            raise ValueError(
                f"inputs have shape {data.shape} and {len(data.sizes)} kinds of ids; expected pairs of a user and an "
                f"item, as in 'movielens'"
            )
        if data.task != "regression":
            raise ValueError(
                f"the targets belong to a {data.task} task; expected numbers, like the ratings of 'movielens'"
            )
        users, items = data.sizes
        return Factors(users, items, self.factors, self.spread)

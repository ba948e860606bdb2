"""Matrix factorisation: ratings as products of users' and items' vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.dataset import Data


@dataclass(frozen=True)
class MatrixFactorization:
    """A rating as the product of a user's and an item's vector, without biases (Koren, Bell & Volinsky 2009).

    Vectors start from U(−`spread`, `spread`). (610 + 9,724) × 20 = 206,680 parameters for MovieLens, ml-latest-small.
    """

    factors: Annotated[int, Bounds(at_least=1)] = 20
    spread: Annotated[float, Bounds(above=0)] = 0.05

    def build_for(self, data: Data) -> nn.Module:
        from shoal.models.layers import Factors

        if data.shape != (2,) or len(data.sizes) != 2:
            raise ValueError(
                f"inputs have shape {data.shape} and ids of {len(data.sizes)} kinds; expected pairs of a user and an "
                f"item, as of 'movielens'"
            )
        if data.task != "regression":
            raise ValueError(
                f"targets are those of a {data.task} task; expected numbers, as the ratings of 'movielens'"
            )
        users, items = data.sizes
        return Factors(users, items, self.factors, self.spread)

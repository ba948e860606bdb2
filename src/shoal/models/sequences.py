"""Networks for tokens: characters and words, as classes of a whole text or as the next token at each place of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from shoal.types import Bounds

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.dataset import Data


@dataclass(frozen=True)
class Lstm:
    """Stacked LSTMs on tokens: Shakespeare, Reddit, Sent140 (Hochreiter & Schmidhuber 1997; LEAF: Caldas et al. 2018).

    The default is LEAF's network for Shakespeare, 819,920 parameters for its 80 characters: classes are read from the
    last state; where each place of a sequence has a target, from each state. `dense` units with ReLU may come before
    the outputs. With `read = "all"`, classes are read from the ReLU of all states in one row: the network of the
    decentralized learning papers, 2,683,708 parameters for texts of 80 out of 92 characters. Their Reddit is
    `embedding = 200, dense = 128`: 4,317,895 for 9,999 words; LEAF's Sent140 is
    `embedding = 100, hidden = 100, dense = 128`.
    """

    embedding: Annotated[int, Bounds(at_least=1)] = 8
    hidden: Annotated[int, Bounds(at_least=1)] = 256
    layers: Annotated[int, Bounds(at_least=1)] = 2
    dense: Annotated[int, Bounds(at_least=0)] = 0
    read: Literal["last", "all"] = "last"

    def build_for(self, data: Data) -> nn.Module:
        from torch import nn

        from shoal.models.layers import Recurrent

        tokens, length = _tokens(data)
        if data.task == "sequence" and self.read == "all":
            raise ValueError("read = 'all': targets are at each place here, and so are read from each state")
        width = self.hidden * length if self.read == "all" else self.hidden
        head: nn.Module = nn.Linear(self.dense or width, data.classes)
        if self.dense:
            head = nn.Sequential(nn.Linear(width, self.dense), nn.ReLU(), head)
        reads = "each" if data.task == "sequence" else self.read
        return Recurrent(tokens, self.embedding, self.hidden, self.layers, head, reads)


@dataclass(frozen=True)
class Transformer:
    """A small causal transformer on tokens, as GPT-2 is built (Vaswani et al. 2017; Radford et al. 2019).

    Blocks of normalised attention and a perceptron of 4 × `width`; learned places; no tied weights. The next token at
    each place, or classes, read at the last. 115,456 parameters for texts of 80 out of 80 characters.
    """

    width: Annotated[int, Bounds(at_least=1)] = 64
    layers: Annotated[int, Bounds(at_least=1)] = 2
    heads: Annotated[int, Bounds(at_least=1)] = 4
    dropout: Annotated[float, Bounds(at_least=0, below=1)] = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width}: expected a multiple of heads = {self.heads}")

    def build_for(self, data: Data) -> nn.Module:
        from shoal.models.layers import CausalTransformer

        tokens, length = _tokens(data)
        last = data.task != "sequence"
        return CausalTransformer(tokens, length, data.classes, self.width, self.layers, self.heads, self.dropout, last)


def _tokens(data: Data) -> tuple[int, int]:
    """How many tokens there are, and how long the texts are."""
    if len(data.shape) != 1 or len(data.sizes) != 1:
        raise ValueError(
            f"inputs have shape {data.shape} and ids of {len(data.sizes)} kinds; expected texts, (length,), of tokens, "
            f"as of 'shakespeare'"
        )
    return data.sizes[0], data.shape[0]

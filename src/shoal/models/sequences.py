"""Networks for texts of tokens (characters or words). They classify a text or predict the token at each position."""

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

    The default is LEAF's network for Shakespeare, with 819,920 parameters for its 80 characters. The output layer reads
    the last state or, if every position of a sequence has a target, each state. A layer of `dense`
    units with ReLU precedes the output layer if `dense` is above 0.

    With `read = "all"`, the output layer reads the ReLU of all states, concatenated. Decentralized learning papers use
    this network: 2,683,708 parameters for texts of 80 characters out of 92. Their network for Reddit is
    `embedding = 200, dense = 128`, with 4,317,895 parameters for 9,999 words. LEAF's network for Sent140 is
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

        tokens, length = _text_sizes(data)
        if data.task == "sequence" and self.read == "all":
            raise ValueError(
                "read = 'all': this data set has a target at each position; use the default, read = 'last'"
            )
        width = self.hidden * length if self.read == "all" else self.hidden
        head: nn.Module = nn.Linear(self.dense or width, data.classes)
        if self.dense:
            head = nn.Sequential(nn.Linear(width, self.dense), nn.ReLU(), head)
        head_input = "each" if data.task == "sequence" else self.read
        return Recurrent(tokens, self.embedding, self.hidden, self.layers, head, head_input)


@dataclass(frozen=True)
class Transformer:
    """Small causal transformer with the architecture of GPT-2 (Vaswani et al. 2017; Radford et al. 2019).

    Each block has layer normalisation, attention and an MLP of 4 × `width` units. Positions are learned and weights are
    not tied. It predicts the next token at each position, or a class at the last position. 115,456 parameters for texts
    of 80 characters out of 80.
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

        tokens, length = _text_sizes(data)
        last_only = data.task != "sequence"
        return CausalTransformer(
            tokens, length, data.classes, self.width, self.layers, self.heads, self.dropout, last_only
        )


def _text_sizes(data: Data) -> tuple[int, int]:
    """Return the size of the vocabulary and the length of the texts."""
    if len(data.shape) != 1 or len(data.sizes) != 1:
        raise ValueError(
            f"inputs have shape {data.shape} and {len(data.sizes)} kinds of ids; expected texts of tokens, (length,), "
            f"as in 'shakespeare'"
        )
    return data.sizes[0], data.shape[0]

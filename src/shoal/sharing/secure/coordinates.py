"""The coordinates that a receiver requests from its senders, if they do not send all.

Only the sum is visible to a receiver, so all its senders must send the same coordinates. The receiver chooses them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.compression.indices import GolombRice, Positions
from shoal.compression.sparse import top_positions
from shoal.errors import MessageError
from shoal.message import Payload
from shoal.node import Node
from shoal.sharing.secure.messages import COORDINATES
from shoal.state import State
from shoal.types import NodeId, Params

SPEED_SMOOTHING = 0.5
"""The weight of the latest speed in the moving average of a coordinate's speed."""
_CODE = GolombRice()


class CoordinateChooser:
    """Chooses the coordinates that have probably changed most at a node and its neighbours since the last average.

    Each expected change is multiplied by the rounds since that average. Without this factor, the same few coordinates
    would be chosen again and again.

    A node knows the change of its own model. It estimates the change at a neighbour from the averages: if a coordinate
    of the mean of n models moves by d in a round, each model moves by √n d, under the assumption that models move
    independently. Without the estimate, coordinates that change only at neighbours would never be requested.
    """

    def __init__(self, params: Params, count: int) -> None:
        self._count = count
        self._averaged = np.array(params)
        """This node's model, each coordinate with its value after its last average."""
        self._mean = np.array(params)
        """The mean of the neighbours, each coordinate with its last known value."""
        self._averaged_in = np.full(params.size, -1, np.int32)
        """The round of each coordinate's last average."""
        self._speed = np.zeros(params.size, np.float32)
        """The estimated change at a neighbour per round."""
        self._round = 0

    def choose(self, params: Params, round: int) -> Positions:
        self._round = round
        rounds = (round - self._averaged_in).astype(np.float32)
        change = np.abs(params - self._averaged) + self._speed * rounds
        return top_positions(change * rounds, self._count)

    def update(self, params: Params, positions: Positions, mean: NDArray[np.float64], senders: int) -> None:
        """Record that these coordinates were averaged in the round of the last `choose`; `params` has the result."""
        rounds = np.maximum(1, self._round - self._averaged_in[positions])  # 0 if averaged twice in one round
        change = np.abs(mean - self._mean[positions]) / rounds
        self._speed[positions] += SPEED_SMOOTHING * (math.sqrt(senders) * change - self._speed[positions])
        self._mean[positions] = mean
        self._averaged[positions] = params[positions]
        self._averaged_in[positions] = self._round

    def state(self) -> State:
        return {
            "averaged": self._averaged.copy(),
            "mean": self._mean.copy(),
            "averaged_in": self._averaged_in.copy(),
            "speed": self._speed.copy(),
        }

    def restore(self, state: State) -> None:
        self._averaged = np.array(state["averaged"], np.float32)
        self._mean = np.array(state["mean"], np.float32)
        self._averaged_in = np.array(state["averaged_in"], np.int32)
        self._speed = np.array(state["speed"], np.float32)


class CoordinateExchange:
    """Exchanges the chosen coordinates between receivers and senders, every round."""

    def __init__(self, params: Params, count: int) -> None:
        self.chooser = CoordinateChooser(params, count)
        self._count, self._size = count, params.size
        self._timeouts: dict[NodeId, tuple[int, int]] = {}
        """Receivers that did not request coordinates in time: the number of timeouts, and the round of the last one."""

    async def run(
        self, node: Node, params: Params, to: Sequence[NodeId], senders: Collection[NodeId], round: int
    ) -> dict[NodeId, Positions]:
        """Request coordinates from `senders`, and return the requests of `to` together with this node's own.

        A receiver that makes no request in time gets no update in this round.
        """
        own = self.chooser.choose(params, round)
        request = Payload({COORDINATES: _CODE.encode(own, self._size)})
        await node.send(sorted(senders), request, round=round, kind=COORDINATES)
        awaited = [receiver for receiver in to if self._is_awaited(receiver, round)]
        requests = await self._receive(node, awaited, round)
        requests |= await self._receive(node, [r for r in to if r not in awaited], round, timeout=0.0)
        for receiver in requests:
            self.mark_responsive(receiver)
        for receiver in awaited:
            if receiver not in requests:
                self._timeouts[receiver] = (self._timeouts.get(receiver, (0, 0))[0] + 1, round)
        positions = {receiver: self._read(payload) for receiver, payload in sorted(requests.items())}
        return {**positions, node.id: own}

    def mark_responsive(self, receiver: NodeId) -> None:
        """Wait for `receiver` again in the next round: a message from it has arrived."""
        self._timeouts.pop(receiver, None)

    def _is_awaited(self, receiver: NodeId, round: int) -> bool:
        """Return whether to wait for a request of `receiver` in this round.

        Waiting for a stopped node in every round would make this node's updates late for all others. So after a timeout
        it waits in the next round, then after two more, four, eight.
        """
        times, latest = self._timeouts.get(receiver, (0, 0))
        return not times or round - latest >= 2 ** (times - 1)

    async def _receive(
        self, node: Node, receivers: Sequence[NodeId], round: int, timeout: float | None = None
    ) -> dict[NodeId, Payload]:
        return await node.receive_each(receivers, round=round, kind=COORDINATES, timeout=timeout, check=self._read)

    def _read(self, payload: Payload) -> Positions:
        code = payload.arrays.get(COORDINATES)
        if code is None:
            raise MessageError(f"no array {COORDINATES!r}")
        return _CODE.decode(code, self._count, self._size)

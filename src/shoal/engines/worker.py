"""Workers: processes that train and evaluate for many nodes, on this machine or on others.

A worker holds a trainer for every node that it serves, with the node's batches and optimizer state. It gets commands
with parameters and returns replies with parameters. `compute` is the code that runs inside a worker. `Worker` is the
worker as the engine sees it; each way to start one implements it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.results.state_files import join, split
from shoal.state import State, Stateful
from shoal.training.trainer import Evaluate, Train, Trainer
from shoal.types import NodeId, Params

MAX_COMMANDS = 32
"""The most commands in one request to a worker."""

Rows: TypeAlias = NDArray[np.float32]
"""A matrix with one parameter vector in each row."""


class Command(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker does for one node."""

    kind: Literal["train", "evaluate", "state", "restore"]
    node: NodeId
    steps: int = 0
    state: bytes = b""
    """The state of the trainer to restore, from `encode_state`."""
    round: int = 0
    step: int = 0
    """The node's round and the number of its local steps so far."""


class Reply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a command: the loss of a training, the scores of an evaluation, or a state."""

    cpu_seconds: float
    loss: float = 0.0
    scores: dict[str, float] = {}
    state: bytes = b""
    """The state of the trainer, from `encode_state`."""
    steps_left_out: int = 0


Replies: TypeAlias = list[Reply] | str
"""One reply per command, or the traceback of the command that failed."""


class Worker(Protocol):
    """A worker, seen from the engine. Requests and replies alternate."""

    external: bool
    """Whether the operating system does not count its processor time as that of a child of this process."""

    def send(self, commands: Sequence[Command], params: Sequence[Params]) -> None:
        """Send at most `MAX_COMMANDS` commands with their parameters. Raises RunError if the worker has ended."""
        ...

    def receive(self) -> tuple[Replies, Rows]:
        """Wait for the replies; row i has the parameters after command i, until the next `send`.

        Raises RunError if the worker has ended.
        """
        ...

    def close(self) -> None:
        """End the worker at once. It has nothing to save."""
        ...


def encode_state(state: State) -> bytes:
    """Encode the state of a trainer: its arrays, and the rest as plain data."""
    arrays, rest = split(state)
    return msgspec.msgpack.encode(
        [{name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()}, rest]
    )


def decode_state(encoded: bytes) -> State:
    """Return the state that `encode_state` encoded."""
    arrays, rest = msgspec.msgpack.decode(encoded)
    decoded = {
        name: np.frombuffer(content, dtype).reshape(shape).copy() for name, (dtype, shape, content) in arrays.items()
    }
    state: State = join(rest, decoded)
    return state


def compute(trainers: Mapping[NodeId, Trainer], commands: Sequence[Command], rows: Rows) -> Replies:
    """Carry out the commands, in a worker. Row i has the parameters of command i; a training replaces them."""
    try:
        return [_compute_one(trainers[command.node], command, rows[i]) for i, command in enumerate(commands)]
    except Exception:
        return traceback.format_exc()


def _compute_one(trainer: Trainer, command: Command, row: Params) -> Reply:
    if command.kind == "state":
        return Reply(0.0, state=encode_state(trainer.state() if isinstance(trainer, Stateful) else {}))
    if command.kind == "restore":
        if isinstance(trainer, Stateful):
            trainer.restore(decode_state(command.state))
        return Reply(0.0)
    started = time.thread_time()
    if command.kind == "train":
        trained = Train(trainer, row, command.steps, command.round, command.step).run()
        row[:] = trained.params
        return Reply(time.thread_time() - started, trained.loss, steps_left_out=trained.steps_left_out)
    scores = Evaluate(trainer, row, command.round, command.step).run()
    return Reply(time.thread_time() - started, scores=scores)

"""The saved state of a node with the counters that the engine keeps for it."""

from __future__ import annotations

from typing import Any

from shoal.mailbox import Mailbox
from shoal.node import Node
from shoal.results.checkpoints import Checkpoints
from shoal.results.state_files import read_state
from shoal.results.thinning import ALL_ROUNDS


def capture(node: Node, mailbox: Mailbox, round: int, **extra: Any) -> dict[str, Any]:
    """Return all that the node needs to continue after `round`. `extra` holds further parts of the engine."""
    activity = node.runtime.activity.state()
    if round >= ALL_ROUNDS:  # the latest record may never be written, so the next one names the receivers again
        activity = {**activity, "recorded": None}
    return {
        "round": round,
        "node": node.state(),
        "late": [[peer, count] for peer, count in sorted(mailbox.late_from.items())],
        "dropped": mailbox.dropped,
        "repeated": mailbox.repeated,
        "train_cpu_s": node.trainer.cpu_seconds,
        "activity": activity,
        **extra,
    }


def restore(node: Node, mailbox: Mailbox, state: dict[str, Any]) -> None:
    """Continue from a state of `capture`."""
    node.restore(state["node"])
    node.checkpoints.saved_round = state["round"]
    mailbox.late_from.update(dict(state["late"]))
    mailbox.late = mailbox.late_from.total()
    mailbox.dropped = state["dropped"]
    mailbox.repeated = state["repeated"]
    node.trainer.cpu_seconds = state["train_cpu_s"]
    if "activity" in state:  # states of earlier versions have none
        node.runtime.activity.restore(state["activity"])


def restore_own(files: Checkpoints, node: Node) -> int | None:
    """Restore a restarted node from its own latest checkpoint. Returns its next round; None if there is none."""
    path = files.latest_of(node.id)
    if path is None:
        return None
    node.restore(read_state(path)["node"])
    return node.next_round

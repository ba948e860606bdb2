"""The record of a node's end."""

from __future__ import annotations

import hashlib

from shoal.mailbox import Mailbox
from shoal.node import Node
from shoal.results.records import End


def end_record(node: Node, mailbox: Mailbox, time: float) -> End:
    """The totals of a node whose algorithm ended at `time`, as far as node and mailbox count them."""
    return End(
        time,
        digest=hashlib.sha256(node.params.tobytes()).hexdigest(),
        bytes_sent=node.bytes_sent,
        messages_sent=node.messages_sent,
        bad_messages=node.rejected_count,
        late_messages=mailbox.late + mailbox.dropped,
        repeated_messages=mailbox.repeated,
        train_cpu_s=node.trainer.cpu_seconds,
        spans=node.runtime.activity.take()[1],
    )

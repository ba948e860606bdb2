"""What is said: how a node's model becomes messages, and messages become a model again."""

from __future__ import annotations

from shoal.sharing.sharing import Checks, Joins, Member, Outgoing, Sharing

SHARINGS: dict[str, str] = {
    "full": "shoal.sharing.full:Full",
}

__all__ = ["SHARINGS", "Checks", "Joins", "Member", "Outgoing", "Sharing"]

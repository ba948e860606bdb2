"""What is said: how a node's model becomes messages, and messages become a model again."""

from __future__ import annotations

from shoal.sharing.sharing import (
    CoordinateSelector,
    NodeAware,
    NodeInfo,
    Outgoing,
    PayloadChecker,
    SenderGroup,
    Sharing,
)

SHARINGS: dict[str, str] = {
    "full": "shoal.sharing.full:FullSharing",
    "random": "shoal.sharing.random:Random",
    "topk": "shoal.sharing.topk:TopK",
    "choco": "shoal.sharing.choco:CHOCO",
    "deepsqueeze": "shoal.sharing.deepsqueeze:DeepSqueeze",
    "float16": "shoal.sharing.quantized:Float16",
    "bfloat16": "shoal.sharing.quantized:BFloat16",
    "int8": "shoal.sharing.quantized:Int8",
    "qsgd": "shoal.sharing.quantized:QSGD",
    "jwins": "shoal.sharing.jwins:JWINS",
    "powergossip": "shoal.sharing.powergossip:PowerGossip",
    "data": "shoal.sharing.data:DataSharing",
    "secure": "shoal.sharing.secure.secure:Secure",
}

__all__ = [
    "SHARINGS",
    "CoordinateSelector",
    "NodeAware",
    "NodeInfo",
    "Outgoing",
    "PayloadChecker",
    "SenderGroup",
    "Sharing",
]

"""Sharings: what nodes send of their models, and how they merge what they receive.

The package may import the foundations, `shoal.message`, `shoal.compression`, `shoal.data` and `shoal.topologies`.
"""

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
    "float16": "shoal.sharing.quantized:Float16Sharing",
    "bfloat16": "shoal.sharing.quantized:BFloat16Sharing",
    "int8": "shoal.sharing.quantized:Int8Sharing",
    "qsgd": "shoal.sharing.quantized:QSGDSharing",
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

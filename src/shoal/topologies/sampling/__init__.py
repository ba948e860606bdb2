"""Topologies whose nodes find their peers by a protocol: a central sampler, or gossip.

Their names are in `shoal.topologies.TOPOLOGIES`; for an algorithm `node.peers(r)` is the same call. The package may
import the foundations, `shoal.message`, `shoal.node` and other topologies.
"""

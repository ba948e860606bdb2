"""How nodes find their peers by talking: from a sampler in the middle, or by gossip.

The names are topologies (`shoal.topologies.TOPOLOGIES`): to an algorithm `node.peers(r)` is the same call.
"""

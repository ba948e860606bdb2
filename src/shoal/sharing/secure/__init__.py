"""Secure aggregation: fixed-point sums, masks, key shares and the protocol that removes the masks of a sum.

It may import the foundations, `shoal.message`, `shoal.node`, `shoal.compression`, `shoal.topologies` and other
sharings.
"""

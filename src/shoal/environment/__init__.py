"""What surrounds nodes: the network model, devices, availability and faults.

The package describes an environment and computes its effect on messages. It does not depend on engines, algorithms or
experiments, and may import only the foundations and `shoal.data.pickles`.
"""

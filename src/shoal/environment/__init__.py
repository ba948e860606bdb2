"""What surrounds nodes: the network model, devices, availability and faults.

The package describes an environment and works out what it does to messages. It knows nothing of engines, algorithms or
experiments, and may import the foundations only.
"""

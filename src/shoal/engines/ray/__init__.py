"""Workers of the simulation on a Ray cluster. Nothing outside this package imports the library `ray`.

The package may import the foundations, `engines` and `experiment`.

cluster.py   connects to Ray or starts it, and reserves CPUs
actors.py    a worker as a Ray actor
"""

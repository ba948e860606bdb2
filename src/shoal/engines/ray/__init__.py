"""Workers of the simulation and agents of the process engine on a Ray cluster.

The package may import the foundations, `engines`, `engines.processes` and `experiment`. Nothing outside this package
imports the library `ray`.

cluster.py   connects to Ray or starts it, and reserves CPUs
actors.py    a worker of the simulation as a Ray actor
agents.py    an agent as a Ray actor, and the plan with which agents join a run
"""

"""The commands: one module for each. Its `add_arguments` declares the arguments of the command.

The package may import every other package except `testing`. The module of a command is imported only when the command
is used, so that `shoal --help` imports none of them.
"""

from __future__ import annotations

COMMANDS = {
    "run": "run an experiment",
    "resume": "continue a run that was stopped, from its latest checkpoint",
    "sweep": "run an experiment with many settings and seeds, and tune settings",
    "show": "show the summary of a run",
    "compare": "compare groups of runs: scores, time and bytes to a target, with confidence intervals",
    "plot": "plot accuracy or another metric of runs over rounds, time or bytes",
    "serve": "show runs in a web page, while they go on and afterwards",
    "export": "export runs to TensorBoard, MLflow or Weights & Biases",
    "export-model": "write the final model of a node, or of all nodes, for other programs",
    "list": "list every name that an experiment may use, with its parameters",
    "topology": "measure and draw a graph",
    "data": "list, download, verify and locate data sets; draw a partition",
    "agent": "run nodes of this machine for a coordinator",
    "deploy": "write the files that run an experiment on SLURM, Kubernetes or Docker Compose",
    "keys": "make, list and check the keys that encrypt the links between nodes",
    "new": "write a plug-in to start from, with its test and an experiment",
    "doctor": "show what this machine can run",
}
"""The help of each command, in the order of `shoal --help`. Its module has the same name, with _ for -."""

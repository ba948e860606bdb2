"""The files that `shoal deploy` writes: a coordinator and agents as jobs of SLURM, Kubernetes or Docker Compose.

Every task is an agent that connects to the coordinator, so hosts and addresses are not known in advance. The package
may import every other package except `testing`.
"""
